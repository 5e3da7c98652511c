"""Curvatures that treat each parameter alone: the identity and the adaptive diagonals of RMSprop and Adam."""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True)
class RMSprop(_Elementwise):
    """M = diag(sqrt(E[Q_u o Q_u]) + eps), E the running average of torch.optim.RMSprop."""

    alpha: float = 0.99
    eps: float = 1e-8

    def __post_init__(self) -> None:
        require(0 <= self.alpha < 1, "alpha", self.alpha, "in [0, 1)")
        require(self.eps > 0, "eps", self.eps, "positive")

    def observe(self, state: State, seen: Seen) -> Metric:
        state["square_avg"] = _running(state.get("square_avg"), [q.square() for q in seen.q_u()], self.alpha)
        return Metric(D=[1 / (v.sqrt() + self.eps) for v in state["square_avg"]])


@dataclass(frozen=True)
class Adam(_Elementwise):
    """M as in torch.optim.Adam, and its running average of the direction Q_u + Q_ux dx."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        for name, beta in zip(("betas[0]", "betas[1]"), self.betas, strict=True):
            require(0 <= beta < 1, name, beta, "in [0, 1)")
        require(self.eps > 0, "eps", self.eps, "positive")

    def observe(self, state: State, seen: Seen) -> Metric:
        state["step"] = state.get("step", 0) + 1
        beta = self.betas[1]
        state["exp_avg_sq"] = _running(state.get("exp_avg_sq"), [q.square() for q in seen.q_u()], beta)
        correction = (1 - beta ** state["step"]) ** 0.5
        return Metric(D=[1 / (v.sqrt() / correction + self.eps) for v in state["exp_avg_sq"]])

    def direction(self, state: State, d: Parts) -> Parts:
        beta = self.betas[0]
        state["exp_avg"] = _running(state.get("exp_avg"), d, beta)
        correction = 1 - beta ** state["step"]
        return [m / correction for m in state["exp_avg"]]
