"""Looks at several small linear layers at once (`ddp.balance.look`), with one call where each of them takes one.

Apart from the eigenvectors such a look is calls alone. So what is a few numbers of each side, its size and the levels
of its root, is one tensor for all sides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddpnopt.ddp.balance import FLOOR, LOW, POWER, decay_if_due, keep_root, plan_next_look, take_in
from ddpnopt.ddp.covariance import CHANGED, Root, note_scale, scale
from ddpnopt.ddp.stage import Stage


class Side(NamedTuple):
    """What a look sees at one side of a layer."""

    name: str
    stage: Stage
    state: dict[str, Any]  # of the layer
    a: Tensor  # (B, n)
    square: float  # of all its numbers
    decay: float


def look_at_all(stages: list[Stage], norms: Callable[[], tuple[list[float], list[float]]]) -> None:
    """Take inputs and output gradients of layers on (B, n) inputs into their moments, where a look is due.

    One process has the whole batch, and no side has more than DENSE features. `norms` are those of the inputs and of
    the output gradients.
    """
    decays = [decay_if_due(stage.state) for stage in stages]
    if all(decay is None for decay in decays):
        return
    info = torch.finfo(stages[0].x.dtype)
    inputs: list[Side] = []
    outputs: list[Side] = []
    for stage, decay, x_norm, p_norm in zip(stages, decays, *norms(), strict=True):
        if decay is None:
            continue
        state, x, p = stage.state, stage.x, stage.p_h[0]
        both = Side("input", stage, state, x, x_norm**2, decay), Side("output", stage, state, p, p_norm**2, decay)
        if all(_is_ordinary(each, info) for each in both):
            inputs.append(both[0])
            outputs.append(both[1])
        else:
            take_in(stage.layer, x, p, state, stage.peers, stage.name, decay)
    if not inputs:
        return
    for each in (*inputs, *outputs):
        _observe(each)
    changes = _renew([*inputs, *outputs], len(inputs))
    for one, of_input, of_output in zip(inputs, changes, changes[len(inputs) :], strict=False):
        one.state.pop("combined_update", None)
        plan_next_look(one.state, max(of_input, of_output), one.stage.peers)


def _is_ordinary(side: Side, info: torch.finfo) -> bool:
    """Whether there are moments that the batch, which is neither zero nor too large, goes into."""
    moments = side.state.get(side.name + "_moments")
    known = moments is not None and moments.dtype == side.a.dtype and side.name + "_used" in side.state
    return known and info.tiny * side.a.numel() <= side.square <= info.max


def _observe(side: Side) -> None:
    """`covariance.observe` of one side."""
    name, _, state, a, square, decay = side
    share = a.shape[1] * (1 - decay) / square
    state[name + "_moments"] = torch.addmm(state[name + "_moments"], a.T, a, beta=decay, alpha=share)
    note_scale(state, name, square / a.numel(), decay)


def _renew(sides: list[Side], inputs: int) -> list[float]:
    """`covariance.root` of all sides that have changed, first the inputs; the relative changes of the metric."""
    current = [side.state[side.name + "_moments"] / side.state[side.name + "_weight"] for side in sides]
    changes = [
        float(torch.dist(C, side.state[side.name + "_used"])) / side.state[side.name + "_norm"]
        for C, side in zip(current, sides, strict=True)
    ]
    changed = [k for k, change in enumerate(changes) if change > CHANGED]
    found = [torch.linalg.eigh(current[k]) for k in changed]
    levels, norms = _levels([values for values, _ in found], sum(k < inputs for k in changed))
    for (_, basis), of_root, norm, k in zip(found, levels, norms, changed, strict=True):
        name, _, state, *_ = sides[k]
        state[name + "_used"], state[name + "_norm"] = current[k], norm
        state[name + "_root"] = {"levels": of_root, "basis": basis, "factor": 1.0}
    for k, (name, stage, state, *_) in enumerate(sides):
        kept, column = state[name + "_root"], scale(state, "input")
        factor = 1 / column if k < inputs else column
        if changes[k] > CHANGED:
            kept["factor"], changes[k] = factor, 2 * abs(POWER) * changes[k]
        else:
            kept, changes[k] = Root(kept).with_factor(factor).kept, 0.0
        keep_root(kept, name, state, stage.name)
    return changes


def _levels(values: list[Tensor], inputs: int) -> tuple[Sequence[Tensor], list[float]]:
    """The levels of roots for the eigenvalues of moments, and the norms of these; first the inputs."""
    if not values:
        return [], []
    sizes = [len(each) for each in values]
    levels = torch.cat(values)
    numbers = iter(levels.tolist())
    norms = [math.hypot(*islice(numbers, n)) for n in sizes]
    levels.clamp_min_(0)
    of_inputs = sum(sizes[:inputs])
    levels[:of_inputs].add_(FLOOR)
    levels[of_inputs:].add_(LOW)
    return levels.pow_(POWER).split_with_sizes(sizes), norms
