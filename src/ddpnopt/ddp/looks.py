"""Looks at several small linear layers at once (`ddp.balance.look`), with one call where each of them takes one.

Alone, two thirds of a look at a layer of some dozen features are the time between calls; the rest are eigenvectors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddpnopt.ddp.balance import FLOOR, LOW, POWER, decay_if_due, keep_root, plan_next_look, take_in
from ddpnopt.ddp.covariance import CHANGED, Root, note_scale, scale
from ddpnopt.ddp.stage import Stage
from ddpnopt.linear.layer import stacked


@dataclass(eq=False)
class Side:
    """What a look sees at one side of a layer."""

    stage: Stage
    name: str
    a: Tensor  # (B, n)
    decay: float
    square: float = 0.0  # of all numbers
    change: float = 0.0  # of the square of the root

    @property
    def state(self) -> dict[str, Any]:
        return self.stage.state

    @property
    def is_ordinary(self) -> bool:
        """Whether there are moments that the batch, which is neither zero nor too large, goes into."""
        info, moments = torch.finfo(self.a.dtype), self.state.get(self.name + "_moments")
        known = moments is not None and moments.dtype == self.a.dtype and self.name + "_used" in self.state
        return known and info.tiny * self.a.numel() <= self.square <= info.max


def look_at_all(stages: list[Stage]) -> None:
    """Take inputs and output gradients of layers on (B, n) inputs into their moments, where a look is due.

    One process has the whole batch, and no side has more than DENSE features.
    """
    due = [(stage, decay) for stage in stages if (decay := decay_if_due(stage.state)) is not None]
    if not due:
        return
    seen = [(stage, decay, (("input", stage.x), ("output", stage.p_h[0]))) for stage, decay in due]
    sides = [Side(stage, side, a, decay) for stage, decay, both in seen for side, a in both]
    for each, norm in zip(sides, stacked(torch._foreach_norm([each.a for each in sides])).tolist(), strict=True):
        each.square = norm**2
    ordinary: list[Side] = []
    for both in zip(sides[::2], sides[1::2], strict=True):
        if all(each.is_ordinary for each in both):
            ordinary += both
        else:
            stage = both[0].stage
            take_in(stage.layer, stage.x, stage.p_h[0], stage.state, stage.peers, stage.name, both[0].decay)
    if ordinary:
        _observe(ordinary)
        _renew(ordinary)
    for ins, out in zip(ordinary[::2], ordinary[1::2], strict=True):
        ins.state.pop("combined_update", None)
        plan_next_look(ins.state, max(ins.change, out.change), ins.stage.peers)


def _observe(sides: list[Side]) -> None:
    """`covariance.observe` of each."""
    for each in sides:
        a, state, moments = each.a, each.state, each.name + "_moments"
        share = a.shape[1] * (1 - each.decay) / each.square
        state[moments] = torch.addmm(state[moments], a.T, a, beta=each.decay, alpha=share)
        note_scale(state, each.name, each.square / a.numel(), each.decay)


def _renew(sides: list[Side]) -> None:
    """`covariance.root` of each where it has changed."""
    moments = [each.state[each.name + "_moments"] for each in sides]
    current = torch._foreach_div(moments, [each.state[each.name + "_weight"] for each in sides])
    apart = torch._foreach_sub(current, [each.state[each.name + "_used"] for each in sides])
    changed: list[tuple[Side, Tensor, Tensor]] = []  # with the moments, and the levels to be
    roots: list[Root] = []
    for each, C, distance in zip(sides, current, stacked(torch._foreach_norm(apart)).tolist(), strict=True):
        state, column = each.state, scale(each.state, "input")
        factor = 1 / column if each.name == "input" else column
        change = distance / state[each.name + "_norm"]
        if change <= CHANGED:
            roots.append(Root(state[each.name + "_root"]).with_factor(factor))
            continue
        values, Q = torch.linalg.eigh(C)
        each.change = 2 * abs(POWER) * change
        changed.append((each, C, values))
        roots.append(Root({"levels": values, "basis": Q, "factor": factor}))
    if changed:
        values = [levels for _, _, levels in changed]
        for (each, C, _), norm in zip(changed, stacked(torch._foreach_norm(values)).tolist(), strict=True):
            each.state[each.name + "_used"], each.state[each.name + "_norm"] = C, norm
        torch._foreach_clamp_min_(values, 0.0)
        torch._foreach_add_(values, [LOW if each.name == "output" else FLOOR for each, _, _ in changed])
        torch._foreach_pow_(values, POWER)
    for each, found in zip(sides, roots, strict=True):
        keep_root(found, each.name, each.state, each.stage.name)
