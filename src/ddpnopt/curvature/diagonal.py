"""Curvatures that treat each parameter alone: the identity and the adaptive diagonals of RMSprop and Adam.

E[Q_u o Q_u] can be close to zero where the feedback Q_ux dx is not: M^-1 (Q_u + Q_ux dx) would be as large as you like.
So each running average is at least (1 - decay) d o d, which d = Q_u itself satisfies: a parameter moves no further than
it could without feedback, and Proposition 1 holds as stated. With `whole` the average is that of d o d alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ddpnopt._checks import require
from ddpnopt.curvature.base import Curvature, Seen, State
from ddpnopt.linear.layer import Parts
from ddpnopt.linear.metric import IDENTITY, Metric


class _Elementwise:
    """What these curvatures have in common."""

    def watches(self, state: State) -> bool:
        return False

    def direction(self, state: State, d: Parts) -> Parts:
        return d

    @property
    def open_loop(self) -> Curvature:
        return self  # type: ignore[return-value]


@dataclass(frozen=True)
class Identity(_Elementwise):
    """M = I: with Q_ux = 0 it is SGD."""

    def observe(self, state: State, seen: Seen) -> Metric:
        return IDENTITY


def _running(old: Parts | None, new: Parts, decay: float) -> Parts:
    """decay * old + (1 - decay) * new, from zero at the start."""
    if old is None:
        return [n * (1 - decay) for n in new]
    return [o * decay + n * (1 - decay) for o, n in zip(old, new, strict=True)]


def _seen(state: State, name: str, squares: Parts, decay: float, whole: bool) -> Parts:
    """The running average with the squares of Q_u; `_bounded` replaces it with `whole`, and needs the old one."""
    old = state.get(name)
    state[name] = _running(old, squares, decay)
    if whole:
        state[f"{name}_before"] = old
    return state[name]


def _bounded(state: State, name: str, d: Parts, decay: float, whole: bool) -> Parts:
    """The running average once d is known, at least (1 - decay) d o d."""
    if whole:
        state[name] = _running(state.pop(f"{name}_before"), [part.square() for part in d], decay)
    else:
        state[name] = [torch.maximum(v, part.square() * (1 - decay)) for v, part in zip(state[name], d, strict=True)]
    return state[name]


@dataclass(frozen=True)
class RMSprop(_Elementwise):
    """M = diag(sqrt(E[Q_u o Q_u]) + eps), E the running average of torch.optim.RMSprop.

    With `whole` the update is divided by the running average of (Q_u + Q_ux dx)^2 instead; the recursion is not.
    """

    alpha: float = 0.99
    eps: float = 1e-8
    whole: bool = False

    def __post_init__(self) -> None:
        require(0 <= self.alpha < 1, "alpha", self.alpha, "in [0, 1)")
        require(self.eps > 0, "eps", self.eps, "positive")

    def observe(self, state: State, seen: Seen) -> Metric:
        squares = [q.square() for q in seen.q_u()]
        return Metric(D=self._inverse(_seen(state, "square_avg", squares, self.alpha, self.whole)))

    def direction(self, state: State, d: Parts) -> Parts:
        before = self._inverse(state["square_avg"])
        after = self._inverse(_bounded(state, "square_avg", d, self.alpha, self.whole))
        return [part * (new / old) for part, old, new in zip(d, before, after, strict=True)]

    def _inverse(self, averages: Parts) -> Parts:
        return [1 / (v.sqrt() + self.eps) for v in averages]


@dataclass(frozen=True)
class Adam(_Elementwise):
    """M as in torch.optim.Adam, and its running average of the direction Q_u + Q_ux dx; `whole` as for RMSprop."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    whole: bool = False

    def __post_init__(self) -> None:
        for name, beta in zip(("betas[0]", "betas[1]"), self.betas, strict=True):
            require(0 <= beta < 1, name, beta, "in [0, 1)")
        require(self.eps > 0, "eps", self.eps, "positive")

    def observe(self, state: State, seen: Seen) -> Metric:
        state["step"] = state.get("step", 0) + 1
        squares = [q.square() for q in seen.q_u()]
        averages = _seen(state, "exp_avg_sq", squares, self.betas[1], self.whole)
        return Metric(D=self._inverse(averages, state["step"]))

    def direction(self, state: State, d: Parts) -> Parts:
        before = self._inverse(state["exp_avg_sq"], state["step"])
        after = self._inverse(_bounded(state, "exp_avg_sq", d, self.betas[1], self.whole), state["step"])
        beta = self.betas[0]
        state["exp_avg"] = _running(state.get("exp_avg"), d, beta)
        correction = 1 - beta ** state["step"]
        return [m / correction * (new / old) for m, old, new in zip(state["exp_avg"], before, after, strict=True)]

    def _inverse(self, averages: Parts, step: int) -> Parts:
        correction = (1 - self.betas[1] ** step) ** 0.5
        return [1 / (v.sqrt() / correction + self.eps) for v in averages]
