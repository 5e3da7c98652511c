"""Whether the training loop changes `.grad` between the backward pass and the step, although it is not filled.

`clip_grad_norm_` reads `.grad` and multiplies it in place. Where autograd does not compute the gradients of the weights
it finds none, returns zero and does nothing, and nobody is told. So in the first steps one small parameter has a zero
for a gradient: torch counts the changes of a tensor in place.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ddpnopt._checks import warn_user
from ddpnopt.errors import TrainingWarning
from ddpnopt.trace.model_layers import ModelLayer
from ddpnopt.trace.recording import LayerRecord, Recording, is_derivative

STEPS = 3  # that are watched


class Untouched:
    """A zero left in `.grad`, and the number of its changes when it was left."""

    def __init__(self) -> None:
        self.steps_left = STEPS
        self._parameter: nn.Parameter | None = None
        self._version = 0
        self._made: nn.Parameter | None = None  # the parameter whose gradient is nothing but our zero

    def is_asked_for(self, layers: list[ModelLayer]) -> bool:
        """Whether hooks on parameters want to see their gradients, which then have to be computed."""
        return any(
            p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None)
            for each in layers
            for p in each.parameters
        )

    def leave(self, recording: Recording, record: LayerRecord, grad: Tensor | None) -> None:
        """In the backward pass of the loss, at the layer whose gradient arrives first."""
        if grad is None or is_derivative(recording):
            return
        p = min(record.parameters, key=lambda p: p.numel())
        if not record.model_layer.required or not (self._parameter is None or self._parameter is p):
            return
        if p.grad is None:
            with torch.no_grad():
                p.grad = torch.zeros_like(p)
            self._made = p
        assert p.grad is not None
        self._parameter, self._version = p, p.grad._version

    def was_changed(self) -> bool:
        """Once per step: whether it is still zero and has been written to. What autograd adds is not zero."""
        p, self._parameter = self._parameter, None
        self.steps_left = max(0, self.steps_left - 1)
        if p is None or p.grad is None or p.grad._version <= self._version:
            return False
        return not bool(p.grad.any())

    def is_all_of(self, parameters: list[nn.Parameter]) -> bool:
        """Whether these, which have a gradient, have it from here alone: a GradScaler must not be content with it."""
        return self._made is not None and all(p is self._made for p in parameters)


def warn_of_change() -> None:
    """Once: the gradients are computed from now on."""
    warn_user(
        "Gradients were clipped, or .grad was changed in place, before step(), but DDPNOpt does not let autograd "
        "compute .grad of layers with feedback: clip_grad_norm_ has returned 0. From now on .grad is computed, as with "
        "weight_grads=True, which costs some time. Steps without lr do not depend on the size of the gradient: "
        "remove the call, unless you need its result.",
        TrainingWarning,
    )


def warn_of_asking() -> None:
    """Once, too."""
    warn_user(
        "autograd.grad(…) by a parameter of the model: DDPNOpt does not let autograd compute gradients of layers with "
        "feedback. From now on they are computed, as with weight_grads=True, which costs some time.",
        TrainingWarning,
    )
