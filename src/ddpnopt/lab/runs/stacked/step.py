"""One step of R networks: the base optimizer's, and Algorithm 3 with V_x and V_xx of each sample (`value.full`).

Shapes: states x~ (R, B, J), weights U (R, O, J), V_h (R, B, O), V_hh (R, B, O, O). The formulas are those of
`ddpnopt.ddp.value.full` with the guard and first order dynamics; the curvatures are the package's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ddpnopt.curvature.base import Seen, State
from ddpnopt.lab.runs.stacked.network import StackedLinear, apply, augmented, derivative
from ddpnopt.lab.runs.stacked.recipe import Recipe
from ddpnopt.linear.metric import Metric

Own = dict[str, Tensor]
"""lr, momentum and vxx_reg of each run: (R,)."""


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
    B = x.shape[1]
    log_p = torch.log_softmax(outs[-1], 2)
    losses = -log_p.gather(2, y[:, :, None]).squeeze(2).mean(1)
    wrong = ~losses.isfinite()
    s = log_p.exp()
    q = s.scatter_add(2, y[:, :, None], s.new_full((), -1.0).expand(*y.shape, 1)) / B
    if recipe.feedback:
        V_xx = (torch.diag_embed(s) - s[:, :, :, None] * s[:, :, None, :]) / B
        wrong = wrong | _ddp(stack, recipe, xs, outs, q, V_xx)
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
        v = v if bend is None else v * bend
        if recipe.careful:
            wrong, v = _without(wrong, v)
        metric, gradient = _observe(stack, recipe, t, xs[t], v)
        steps.append(_direction(stack, recipe, t, metric, gradient))
        v = v @ stack.U[t][:, :, :-1]
    for t, step in enumerate(reversed(steps)):
        wrong = wrong | _descend(stack, t, step, recipe.careful)
    return wrong


def _ddp(stack: Stack, recipe: Recipe, xs: list[Tensor], outs: list[Tensor], V_x: Tensor, V_xx: Tensor) -> Tensor:
    """Algorithm 3: the backward pass of V_x and V_xx, then the forward pass with dx."""
    wrong = V_x.new_zeros(len(V_x), dtype=torch.bool)
    eta = stack.own["lr"][:, None, None]
    kept: list[tuple[Tensor, Tensor | None, Metric]] = []
    for t in reversed(range(len(xs))):
        bend = derivative(stack.kinds[t], outs[t])
        V_h, V_hh = V_x, V_xx
        if bend is not None:
            V_h, V_hh = bend * V_x, bend[:, :, :, None] * V_xx * bend[:, :, None, :]
        wrong, V_h, V_hh = _without(wrong, V_h, V_hh)
        metric, _ = _observe(stack, recipe, t, xs[t], V_h)
        C = None
        if t > 0:
            W = stack.U[t][:, :, :-1]
            root, N_V_h = _output_metric(metric, xs[t], V_h, eta)
            C = _guarded(V_hh, root)
            V_x = (V_h - (C @ N_V_h[:, :, :, None])[:, :, :, 0]) @ W
            V_xx = _times(_times(C, W).mT, W)
            V_xx.diagonal(dim1=2, dim2=3).add_(stack.own["vxx_reg"][:, None, None])
        kept.append((V_h, C, metric))
    x_hat = xs[0]
    for t, (V_h, C, metric) in enumerate(reversed(kept)):
        V = V_h
        if C is not None:
            W_dx = (x_hat - xs[t])[:, :, :-1] @ stack.U[t][:, :, :-1].mT
            V = V_h + (C @ W_dx[:, :, :, None])[:, :, :, 0]
        step = _direction(stack, recipe, t, metric, V.mT @ xs[t])
        wrong = wrong | _descend(stack, t, step, recipe.careful)
        out = apply(stack.kinds[t], torch.bmm(x_hat, stack.U[t].mT))
        x_hat = augmented(out)
    return wrong | ~_finite(out)


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
    return ~_finite(stack.U[t]) if check else torch.zeros_like(momentum, dtype=torch.bool)


def _output_metric(metric: Metric, x: Tensor, V_h: Tensor, eta: Tensor) -> tuple[Tensor, Tensor]:
    """N = eta g_u M^-1 g_u' as root' root, root (R, B, O) for a diagonal or (R, B, O, O); and N V_h."""
    if metric.T_A is None or metric.T_G is None:
        D = None if metric.D is None else metric.D[0]
        squares = x.square()
        S = squares.sum(2, keepdim=True) if D is None else squares @ D.mT
        S = (eta * S).expand_as(V_h)
        return S.sqrt(), S * V_h
    squares = (x @ metric.T_A.mT).square()
    S = squares.sum(2, keepdim=True) if metric.D is None else squares @ metric.D[0].mT
    S = (eta * S).expand_as(V_h)
    root = S.sqrt()[:, :, :, None] * metric.T_G[:, None]
    return root, (S * (V_h @ metric.T_G.mT)) @ metric.T_G


def _guarded(V: Tensor, root: Tensor) -> Tensor:
    """C = (I + V N)^-1 V = V - V root' (I + root V root')^-1 root V."""
    if root.dim() == 3:
        RV = root[:, :, :, None] * V
        A = RV * root[:, :, None, :]
    else:
        RV = root @ V
        A = RV @ root.mT
    A.diagonal(dim1=2, dim2=3).add_(1)
    factor, failed = torch.linalg.cholesky_ex(A)
    if bool(failed.any()):  # rounding has made V indefinite: A is still symmetric, but only LU can do it
        Z, _ = torch.linalg.solve_ex(A, RV)
        return V - RV.mT @ Z
    Y = torch.linalg.solve_triangular(factor, RV, upper=False)
    return V - Y.mT @ Y


def _times(V: Tensor, W: Tensor) -> Tensor:
    """V W for each run: (R, B, k, n), (R, n, m) -> (R, B, k, m)."""
    R, B, k, n = V.shape
    return torch.bmm(V.reshape(R, B * k, n), W).view(R, B, k, -1)


def _finite(x: Tensor) -> Tensor:
    """Which runs have only finite numbers: a sum shows it, and reads the tensor once."""
    return x.flatten(1).sum(1).isfinite()


def _without(wrong: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
    """Puts zeros instead of runs that are not finite, for which an eigendecomposition would raise an error."""
    now = ~torch.stack([_finite(part) for part in parts]).all(0)
    if bool(now.any()):
        parts = tuple(
            torch.where(now.view(-1, *[1] * (part.dim() - 1)), torch.zeros_like(part), part) for part in parts
        )
    return (wrong | now, *parts)
