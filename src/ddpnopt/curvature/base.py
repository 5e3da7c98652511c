"""What a curvature knows: Q_uu ~ M / eta of Table 2, its running state and its inverse.

A curvature holds settings only. Its state lives in a dict for each layer whose entries are *replaced, never changed in
place*, so that a step which fails can be taken back by putting the old entries back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from ddpnopt._distributed import ALONE, Peers
from ddpnopt.errors import OptionError
from ddpnopt.linear.layer import Layer, Parts
from ddpnopt.linear.metric import IDENTITY, Metric

State = dict[str, Any]


@dataclass(frozen=True)
class Seen:
    """What one layer shows to its curvature in one step."""

    gradient: Callable[[], Parts]  # sum_i g_u' V_h, called only if needed
    l_u: Parts | None = None  # gradient of the stage cost
    layer: Layer | None = None  # None for parameters that belong to no supported layer
    x: Tensor | None = None  # inputs of the layer
    v_h: Callable[[], Tensor] | None = None  # V_h of each sample as a share of the batch loss
    scale: float = 1.0  # times v_h gives the sample's own gradient: B for a mean loss, 1 for a sum
    peers: Peers = ALONE  # who have the other samples of the batch; `gradient` is over all of them already
    solve_only: bool = False  # M^-1 will be applied to the gradient and nothing else be asked of it: no feedback

    def q_u(self) -> Parts:
        """Q_u = l_u + sum_i g_u' V_h."""
        gradient = self.gradient()
        return gradient if self.l_u is None else [g + l for g, l in zip(gradient, self.l_u, strict=True)]


@runtime_checkable
class Curvature(Protocol):
    """The interface of a curvature."""

    def observe(self, state: State, seen: Seen) -> Metric:
        """Bring M up to date, once a step, and return its inverse."""

    def direction(self, state: State, d: Parts) -> Parts:
        """What is multiplied by M^-1, given d = Q_u + Q_ux dx: d itself, or its running average."""

    def watches(self, state: State) -> bool:
        """Whether the next `observe` needs the layer's inputs and output gradients."""

    @property
    def open_loop(self) -> Curvature:
        """What updates the parameters that belong to no supported layer."""


class _Elementwise:
    """What the curvatures that look at each parameter alone share."""

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


def require(holds: bool, option: str, value: object, wanted: str) -> None:
    """Raise an error that names the option unless `holds`."""
    if not holds:
        raise OptionError(f"{option}={value!r} is not allowed: it must be {wanted}.")
