"""One step of R networks: the base optimizer's, and Algorithm 3 with V_x and V_xx of each sample (`bellman`).

Shapes: states x~ (R, B, J), weights U (R, O, J), V_h (R, B, O). The curvatures are the package's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ddpnopt.curvature.base import Seen, State
from ddpnopt.lab.baselines.vgr import penalty_gradient
from ddpnopt.lab.runs.stacked.bellman import finite, policies, without
from ddpnopt.lab.runs.stacked.factored import applies, factored_policies
from ddpnopt.lab.runs.stacked.losses import LOSSES
from ddpnopt.lab.runs.stacked.network import StackedLinear, apply, augmented, derivative
from ddpnopt.lab.runs.stacked.recipe import Recipe
from ddpnopt.linear.metric import Metric

Own = dict[str, Tensor]
"""lr, momentum, vxx_reg and weight of each run: (R,)."""


@dataclass
class Stack:
    """The weights of R runs, the states of their curvatures, and their own numbers."""

    kinds: Sequence[str]
    U: list[Tensor]
    own: Own
    states: list[State] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.states = self.states or [{} for _ in self.U]

    @property
    def runs(self) -> int:
        return len(self.U[0])

    def select(self, rows: Tensor) -> Stack:
        """The stack of some of the runs."""
        return Stack(
            self.kinds,
            [u[rows] for u in self.U],
            {name: each[rows] for name, each in self.own.items()},
            [{name: _rows(value, rows) for name, value in state.items()} for state in self.states],
        )


def _rows(value: Any, rows: Tensor) -> Any:
    if isinstance(value, list):
        return [_rows(each, rows) for each in value]
    return value[rows] if isinstance(value, Tensor) else value  # the count of steps is the same for all


def losses_and_step(stack: Stack, recipe: Recipe, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Takes a step on each run's batch x (R, B, n), y (R, B).

    Returns the losses before it (R,), and which runs have gone wrong: their rows are to be thrown away.
    """
    xs, outs = forward(stack, x)
    losses, gradient, root = LOSSES[recipe.loss](outs[-1], y)
    wrong = ~losses.isfinite()
    q = gradient / x.shape[1]
    if recipe.feedback:
        factor = gradient[:, :, None, :] if recipe.terminal == "gn" else root()
        wrong = wrong | _closed_loop(stack, recipe, xs, outs, q, factor * math.sqrt(recipe.vxx_scale(x.shape[1])))
    else:
        wrong = wrong | _open_loop(stack, recipe, xs, outs, q)
    return losses, wrong


def forward(stack: Stack, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """x~ at the input of every layer, and what came out behind its activation."""
    xs, outs = [], []
    for kind, u in zip(stack.kinds, stack.U, strict=True):
        xs.append(augmented(x))
        x = apply(kind, torch.bmm(xs[-1], u.mT))
        outs.append(x)
    return xs, outs


def _open_loop(stack: Stack, recipe: Recipe, xs: list[Tensor], outs: list[Tensor], q: Tensor) -> Tensor:
    """Q_ux = 0: SGD, RMSprop, Adam, KFAC, EKFAC."""
    wrong = q.new_zeros(len(q), dtype=torch.bool)
    steps: list[Tensor] = []
    v = q
    for t in reversed(range(len(xs))):
        bend = derivative(stack.kinds[t], outs[t])
        delta, v = v, v if bend is None else v * bend
        if recipe.careful:
            wrong, v = without(wrong, v)
        metric, gradient = _observe(stack, recipe, t, xs[t], v)
        if recipe.penalised:
            penalty = penalty_gradient(stack.U[t][:, :, :-1], v, delta)
            gradient = gradient + stack.own["weight"][:, None, None] * F.pad(penalty, (0, 1))
        steps.append(_direction(stack, recipe, t, metric, gradient))
        v = v @ stack.U[t][:, :, :-1]
    for t, step in enumerate(reversed(steps)):
        wrong = wrong | _descend(stack, t, step, recipe.careful)
    return wrong


def _closed_loop(
    stack: Stack, recipe: Recipe, xs: list[Tensor], outs: list[Tensor], V_x: Tensor, root: Tensor
) -> Tensor:
    """Algorithm 3: the backward pass of V_x and V_xx, which begins as root' root, then the forward pass with dx."""

    def observe(t: int, V_h: Tensor) -> Metric:
        return _observe(stack, recipe, t, xs[t], V_h)[0]

    given = stack.kinds, stack.U, stack.own, recipe, xs, outs, V_x
    if applies(recipe, stack.own):
        wrong, found = factored_policies(*given, root, observe)
    else:
        wrong, found = policies(*given, root.mT @ root, observe)
    x_hat = xs[0]
    for t, (policy, metric) in enumerate(found):
        step = _direction(stack, recipe, t, metric, policy(x_hat))
        wrong = wrong | _descend(stack, t, step, recipe.careful)
        out = apply(stack.kinds[t], torch.bmm(x_hat, stack.U[t].mT))
        x_hat = augmented(out)
    return wrong | ~finite(out)


def _observe(stack: Stack, recipe: Recipe, t: int, x: Tensor, V_h: Tensor) -> tuple[Metric, Tensor]:
    """M of layer t brought up to date; the gradient (R, O, J)."""
    layer = StackedLinear(tuple(stack.U[t].shape))
    gradient = V_h.mT @ x
    seen = Seen(
        lambda: [gradient], None, layer, x.transpose(0, 1), lambda: V_h.transpose(0, 1), scale=float(x.shape[1])
    )
    return recipe.curvature.observe(stack.states[t], seen), gradient


def _direction(stack: Stack, recipe: Recipe, t: int, metric: Metric, d: Tensor) -> Tensor:
    """M^-1 of the running average of d."""
    layer = StackedLinear(tuple(stack.U[t].shape))
    return metric.solve(layer, recipe.curvature.direction(stack.states[t], [d]))[0]


def _descend(stack: Stack, t: int, step: Tensor, check: bool) -> Tensor:
    """u <- u - lr (step + momentum); which runs are not finite after it."""
    momentum, state = stack.own["momentum"], stack.states[t]
    if bool(momentum.any()):
        if "momentum_buffer" in state:
            step = step + momentum[:, None, None] * state["momentum_buffer"]
        state["momentum_buffer"] = step
    stack.U[t] = torch.addcmul(stack.U[t], stack.own["lr"][:, None, None], step, value=-1)
    return ~finite(stack.U[t]) if check else torch.zeros_like(momentum, dtype=torch.bool)
