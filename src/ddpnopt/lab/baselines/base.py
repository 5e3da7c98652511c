"""What the baselines that look at single layers have in common: an optimizer in the ordinary training loop."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ddpnopt._checks import require_finite
from ddpnopt.errors import ModelError, OptionError
from ddpnopt.lab.baselines.chain import ChainStage, chain, check_deterministic
from ddpnopt.trace.hooked_optimizer import HookedOptimizer
from ddpnopt.trace.hooks import Capture


@dataclass(eq=False)
class Pass:
    """One forward and backward pass through the chain, frozen: x_0 .. x_T and the gradients of the batch loss."""

    x: list[Tensor]  # T + 1 states, (B, …): the inputs of the layers and the output
    grad_x: list[Tensor | None]  # T + 1 gradients at them; None at x_0 where the input needs none
    grad_h: list[Tensor]  # T gradients at the layers' outputs, before the activation


class ChainOptimizer(HookedOptimizer):
    """An optimizer that sees the layers of a chain with their inputs and gradients.

    Subclasses compute all new weights in `_propose`; they are written only if every one of them is finite.
    """

    def __init__(self, model: nn.Module, defaults: dict[str, Any], *, skip_weight_grads: bool) -> None:
        name = type(self).__name__
        if not isinstance(model, nn.Module):
            raise OptionError(f"model must be an nn.Module, not {type(model).__name__}: {name}(model, …).")
        self.model = model
        self.stages: list[ChainStage] = chain(model, name)
        super().__init__([p for stage in self.stages for p in stage.parameters], defaults)
        self._capture = Capture(model, [s.unit for s in self.stages], skip_weight_grads=skip_weight_grads)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.param_groups:
            raise OptionError(f"{type(self).__name__} trains all of the model with one setting: no further groups.")
        super().add_param_group(param_group)

    def _step(self) -> None:
        check_deterministic(self.model, type(self).__name__)
        seen = self._passed()
        require_finite(seen.grad_h, "the gradient of the loss")
        self._capture.enabled = False  # a model that is a single layer would take its stage for a forward pass
        try:
            new = self._propose(seen)
        finally:
            self._capture.enabled = True
        require_finite([w for u in new for w in u], "a weight after the step")
        for stage, u in zip(self.stages, new, strict=True):
            for parameter, weight in zip(stage.parameters, u, strict=True):
                parameter.copy_(weight)

    def _passed(self) -> Pass:
        """The trajectory that the hooks have seen, in the precision of the weights."""
        recording = self._capture.arrivals.take()
        by_unit = {id(record.model_layer): record for record in recording.layers}
        stages = [by_unit.get(id(stage.unit)) for stage in self.stages]
        arrived = [q for q in recording.q if q is not None]
        if any(stage is None for stage in stages) or len(arrived) != 1 or len(recording.outputs) != 1:
            raise ModelError(
                f"{type(self).__name__} needs the gradient of the loss at the model's one output and at every layer: "
                "compute the loss from model(inputs), from all of it, outside the model."
            )
        seen = [stage for stage in stages if stage is not None]
        dtype = self.stages[0].parameters[0].dtype  # autocast may have made the states smaller
        return Pass(
            [*(s.x.to(dtype) for s in seen), recording.outputs[0].to(dtype)],
            [*(None if s.p_x is None else s.p_x.to(dtype) for s in seen), arrived[0].to(dtype)],
            [s.p_h.to(dtype) for s in seen if s.p_h is not None],
        )

    @abstractmethod
    def _propose(self, seen: Pass) -> list[list[Tensor]]:
        """New weights of each stage."""
