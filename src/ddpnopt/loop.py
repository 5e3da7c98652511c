"""What every optimizer with hooks on a model shares in the user's training loop."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor

from ddpnopt.capture import Capture
from ddpnopt.errors import NonFiniteError


class HookedOptimizer(torch.optim.Optimizer):
    """An optimizer that steps from what its capture has recorded."""

    _capture: Capture

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
            self._step()
        finally:
            self._capture.forget()
        return loss

    @abstractmethod
    def _step(self) -> None:
        """One step; what it cannot finish it leaves as it was."""


def require_finite(tensors: list[Tensor], what: str, advice: str = "") -> None:
    """Raise `NonFiniteError` if any number is NaN or infinite."""
    # a sum is finite exactly if all terms are (but for one beyond 1e38), and reads each tensor once
    total = torch.stack([t.sum(dtype=torch.float32) if t.dtype.itemsize < 4 else t.sum().float() for t in tensors])
    if not bool(total.sum().isfinite()):
        raise NonFiniteError(f"{what} is not finite. Weights and state are as they were before this step.{advice}")
