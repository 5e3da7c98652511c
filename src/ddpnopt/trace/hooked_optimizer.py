"""The part of the training loop that all optimizers with hooks on a model have in common."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast, overload

import torch
from torch import Tensor, nn
from torch.optim import optimizer as optimizers

from ddpnopt.errors import OptionError
from ddpnopt.trace.hooks import Capture
from ddpnopt.trace.rescaling import scale, scaler_factor, traced_factor
from ddpnopt.trace.untouched import warn_of_change

Step = TypeVar("Step", bound=Callable[..., Any])


def loss_value(loss: Any, *, given: bool) -> float | None:
    """The number in a loss; None for one that is not a number or not finite, an error for a wrong argument."""
    if isinstance(loss, Tensor) and loss.numel() == 1 and not loss.is_complex():
        value = float(loss.detach())
    elif isinstance(loss, (int, float)):
        value = float(loss)
    elif given:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise OptionError(f"step(loss=…) takes the scalar that backward() was called on, or its value, not {what}.")
    else:  # a closure may return anything
        return None
    return value if math.isfinite(value) else None


def seen_by_torch(step: Step) -> Step:
    """A `step` with what torch adds to that of each optimizer, a profiler's range and hooks, if anyone uses them."""
    with_all = torch.optim.Optimizer.profile_hook_step(step)

    @wraps(step)
    def wrapped(self: HookedOptimizer, *args: Any, **kwargs: Any) -> Any:
        hooks = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
        common = optimizers._global_optimizer_pre_hooks or optimizers._global_optimizer_post_hooks
        if hooks or common or torch._C._autograd._profiler_enabled():
            return with_all(self, *args, **kwargs)
        return step(self, *args, **kwargs)

    wrapped.hooked = True  # type: ignore[attr-defined]  # what torch looks at before it adds them itself
    return cast(Step, wrapped)


class HookedOptimizer(torch.optim.Optimizer):
    """An optimizer that steps from what its capture has recorded."""

    _capture: Capture
    _loss_value: float | None = None  # of the loss, for the step that is being taken
    _free_of_scale = False  # whether the length of a step does not depend on that of the gradient
    _step_supports_amp_scaling = True  # a GradScaler leaves it to step() to remove the loss scale

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"{type(self).__name__} holds hooks on the model and cannot be pickled: save opt.state_dict() instead."
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        if set_to_none and not torch._C._autograd._profiler_enabled():  # without the context that a profiler shows
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad = None
        else:
            super().zero_grad(set_to_none)
        self._capture.arrivals.forget()

    @overload  # type: ignore[override]
    def step(self, closure: None = None, *, loss: float | Tensor | None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float | Tensor], *, loss: float | Tensor | None = None) -> float | Tensor: ...

    @torch.no_grad()
    def step(
        self, closure: Callable[[], float | Tensor] | None = None, *, loss: float | Tensor | None = None
    ) -> float | Tensor | None:
        """Take one step from the last forward and backward pass, or from the closure's, called once.

        Args:
            closure: computes the loss, calls backward() and returns the loss.
            loss: the value of the loss that backward() was called on; the closure's return value if there is one.
        """
        returned = None if closure is None else self._evaluate(closure)
        self._loss_value = loss_value(returned if loss is None else loss, given=loss is not None)
        if self._loss_value is None:
            self._loss_value = self._seen_loss()
        for p in self._with_gradient():
            if p.grad is not None and p.grad.is_sparse:  # an embedding without feedback; all sums here need dense ones
                p.grad = p.grad.to_dense()
        changed = self._capture.untouched.was_changed() and not hasattr(self, "found_inf")
        try:
            if not hasattr(self, "found_inf") or self._unscaled():  # set by a GradScaler
                self._attempt()
            if changed and self._capture.skip_weight_grads:
                self._capture.skip_weight_grads = False
                warn_of_change()
        finally:
            self._loss_value = None
            self._capture.arrivals.clear()
            self._capture.unseen.remember(self._with_gradient())
        return returned

    def _with_gradient(self) -> list[nn.Parameter]:
        """In most steps none or few: autograd does not compute those of layers with feedback."""
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    def _seen_loss(self) -> float | None:
        """The loss that backward() was called on, without the scale of a GradScaler."""
        total = self._capture.arrivals.loss_value()
        if total is None or getattr(self, "found_inf", None) is None:
            return total
        scale = getattr(self, "grad_scale", None)
        factor = self._factor_of_unscaling() if scale is None else 1 / float(scale)
        return None if factor is None else total * factor

    def _attempt(self) -> None:
        self._step()

    @staticmethod
    def _evaluate(closure: Callable[[], float | Tensor]) -> float | Tensor:
        with torch.enable_grad():
            return closure()

    def _unscaled(self) -> bool:
        """Remove the scale of a GradScaler from all gradients; False after an overflow, when no step is taken."""
        if self._capture.untouched.is_all_of(self._with_gradient()):
            self.found_inf: Any = 0  # as a sum over no gradients
        unscaled = self._factor_of_unscaling()
        factor = scaler_factor(self, weight_grads=unscaled is not None or not self._capture.skip_weight_grads)
        if factor is None:
            self._overflowed()
            return False
        if unscaled is not None:  # `.grad` has it already
            self._scale_recorded(unscaled)
        elif factor != 1.0:
            grads = [p.grad for p in self._with_gradient() if p.grad is not None]
            if grads:
                torch._foreach_mul_(grads, factor)
            self._scale_recorded(factor)
        return True

    def _factor_of_unscaling(self) -> float | None:
        """What `scaler.unscale_` has multiplied `.grad` by, where clipping after it has no effect on a step."""
        if (
            not (self._free_of_scale and self._capture.skip_weight_grads)
            or getattr(self, "grad_scale", None) is not None
        ):
            return None
        return traced_factor(self._with_gradient())

    def _scale_recorded(self, factor: float) -> None:
        for recording in self._capture.arrivals.passes():
            scale(recording, factor)
        self._capture.arrivals.scale_terms(factor)

    def _overflowed(self) -> None:
        """A GradScaler has found an overflow in the scaled gradients: no step is taken."""
        return

    @abstractmethod
    def _step(self) -> None:
        """One step; if it fails, weights and state stay as they were."""
