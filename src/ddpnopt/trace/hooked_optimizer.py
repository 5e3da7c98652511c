"""What every optimizer with hooks on a model shares in the user's training loop."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor

from ddpnopt.trace.hooks import Capture
from ddpnopt.trace.rescaling import scaler_factor


class HookedOptimizer(torch.optim.Optimizer):
    """An optimizer that steps from what its capture has recorded."""

    _capture: Capture
    _step_supports_amp_scaling = True  # a GradScaler leaves it to step() to take the loss scale off

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"{type(self).__name__} holds hooks on the model and cannot be pickled: save opt.state_dict() instead."
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._capture.forget()

    @overload  # type: ignore[override]
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float | Tensor]) -> float | Tensor: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float | Tensor] | None = None) -> float | Tensor | None:
        """Take one step from the last forward and backward pass, or from the closure's, called once."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            factor = scaler_factor(self, weight_grads=not self._capture.skip_weight_grads)
            if factor is None:
                self._overflowed()
            else:
                self._unscale(factor)
                self._step()
        finally:
            self._capture.forget()
        return loss

    def _unscale(self, factor: float) -> None:
        """Take the loss scale off whatever has arrived."""
        if factor == 1.0:
            return
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if grads:
            torch._foreach_mul_(grads, factor)
        self._capture.scale(factor)

    def _overflowed(self) -> None:
        """A GradScaler has found that the scaled gradients have overflown: no step."""
        return

    @abstractmethod
    def _step(self) -> None:
        """One step; what it cannot finish it leaves as it was."""
