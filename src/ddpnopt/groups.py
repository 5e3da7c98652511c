"""Parameter groups as the layers see them: one learning rate and momentum a layer, and its stage cost l_u."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ddpnopt.curvature.base import Adam, Curvature, require
from ddpnopt.ddp.sweep import norm
from ddpnopt.errors import OptionError
from ddpnopt.linear.layer import Parts
from ddpnopt.trace.recording import Stage
from ddpnopt.trace.rescaling import Average, own_gradient, rounding

Group = dict[str, Any]


class Groups:
    """The groups of an optimizer, by parameter."""

    def __init__(self, groups: list[Group], names: dict[nn.Parameter, str], curvature: Curvature) -> None:
        self.groups, self.names, self.curvature = groups, names, curvature
        self._of: dict[nn.Parameter, Group] = {}
        for group in groups:
            self.check(group)

    def check(self, group: Group) -> None:
        """Complain about settings that make no sense, and parameters that are not the model's."""
        for option in ("lr", "momentum", "weight_decay"):
            require(float(group[option]) >= 0, option, group[option], "zero or positive")
        self._check_momentum(group)
        for p in group["params"]:
            if p not in self.names:
                raise OptionError(f"params: a parameter of shape {tuple(p.shape)} does not belong to the model.")

    def _check_momentum(self, group: Group) -> None:  # at each step, too: a scheduler may have set it
        if isinstance(self.curvature, Adam) and group["momentum"]:
            raise OptionError(
                f"momentum={group['momentum']} is not for curvature='adam', which has its own: set Adam(betas=…), and "
                "cycle_momentum=False in OneCycleLR."
            )

    def of(self, parameter: nn.Parameter) -> Group:
        """The group that a parameter is in."""
        found = self._of.get(parameter)
        if found is None or not any(found is group for group in self.groups):  # load_state_dict makes new groups
            self._of = {p: group for group in self.groups for p in group["params"]}
            found = self._of[parameter]
        return found

    def settings(self, name: str, parameters: list[nn.Parameter]) -> tuple[Group, Parts | None]:
        """The group of a layer, and l_u of its parameters by weight decay."""
        groups = [self.of(p) for p in parameters]
        self._check_momentum(groups[0])
        for option in ("lr", "momentum") if groups[0] is not groups[-1] else ():
            if groups[0][option] != groups[-1][option]:
                raise OptionError(
                    f"Weight and bias of layer '{name}' are in parameter groups with {option}={groups[0][option]} and "
                    f"{groups[-1][option]}: a layer is one control and needs one {option}. Groups may differ in "
                    "weight_decay."
                )
        if not any(group["weight_decay"] for group in groups):
            return groups[0], None
        return groups[0], [p.detach() * group["weight_decay"] for p, group in zip(parameters, groups, strict=True)]

    def stage_cost(self) -> float:
        """Weight decay as a cost, lambda |u|^2 / 2."""
        decayed = [g for g in self.groups if g["weight_decay"]]
        return float(sum(0.5 * g["weight_decay"] * p.square().sum() for g in decayed for p in g["params"]))


def penalty(captured: Stage, average: Average = list) -> Parts | None:
    """What the loss has on the weights beside the layer's output (a norm of them, another use): part of l_u."""
    parameters = captured.unit.parameters
    if all(p.grad is None for p in parameters):
        return None
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    if captured.skipped:  # the layer's own part has not been computed, so this is something else
        return grads if norm(grads) > 0 else None
    own = average(own_gradient(captured))
    other = [g - o for g, o in zip(grads, own, strict=True)]
    return other if norm(other) > rounding(captured) * norm(own) else None
