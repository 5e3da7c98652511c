"""Kronecker-factored curvatures: M ~ E[x~ x~'] (x) E[V_h V_h'] (eq. 15 and Table 2).

With places P (pixels, tokens) the input factor is averaged and the output factor summed over them, as in KFC (Grosse
and Martens 2016); which of the two takes the average does not matter for the product nor for the damping below.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ddpnopt._checks import require
from ddpnopt.curvature.base import Curvature, Seen, State
from ddpnopt.curvature.diagonal import Identity
from ddpnopt.errors import NonFiniteError
from ddpnopt.linear.eigen import eigh
from ddpnopt.linear.layer import Layer
from ddpnopt.linear.metric import Metric


def factors(layer: Layer, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """A = E[x~ x~'] (g, J, J) and G = E[v v'] (g, O, O) for inputs x and each sample's own output gradients v."""
    X, V = layer.augmented(x), layer.rows(v)
    B, P = X.shape[:2]
    X, V = X.flatten(0, 1).transpose(0, 1), V.flatten(0, 1).transpose(0, 1)  # (g, B P, J), (g, B P, O)
    return X.mT @ X / (B * P), V.mT @ V / B


def _seen_factors(seen: Seen) -> tuple[Tensor, Tensor]:
    if seen.layer is None or seen.x is None or seen.v_h is None:
        raise TypeError("Kronecker factors need a layer")  # cannot happen: `open_loop` is the identity
    mine = factors(seen.layer, seen.x, seen.v_h() * seen.scale)
    if seen.peers.alone:
        return mine
    A, G = seen.peers.sum([f * seen.peers.share(len(seen.x)) for f in mine])
    return A, G


class _Kronecker:
    refresh: int

    @property
    def open_loop(self) -> Curvature:
        return Identity()  # a parameter without a layer has no factors: plain SGD

    def _due(self, state: State) -> bool:
        return bool(state.get("step", 0) % self.refresh == 0)

    def direction(self, state: State, d: list[Tensor]) -> list[Tensor]:
        return d

    def _check(self, damping: float) -> None:
        require(damping > 0, "damping", damping, "positive")
        require(isinstance(self.refresh, int) and self.refresh >= 1, "refresh", self.refresh, "an integer >= 1")


@dataclass(frozen=True)
class KFAC(_Kronecker):
    """KFAC (Martens and Grosse 2015): running averages of A and G, factored Tikhonov damping.

    The inverse is (A + pi sqrt(damping) I)^-1 (x) (G + sqrt(damping) / pi I)^-1 with pi^2 the ratio of the factors'
    mean eigenvalues. A and G are updated and inverted every `refresh` steps, with weight 1 - min(1 - 1/k, decay) for
    the k-th.
    """

    damping: float = 1e-2
    refresh: int = 10
    decay: float = 0.95

    def __post_init__(self) -> None:
        self._check(self.damping)
        require(0 <= self.decay < 1, "decay", self.decay, "in [0, 1)")

    def watches(self, state: State) -> bool:
        return self._due(state)

    def observe(self, state: State, seen: Seen) -> Metric:
        if self._due(state):
            A, G = _seen_factors(seen)
            k = state.get("step", 0) // self.refresh + 1
            keep = min(1 - 1 / k, self.decay)
            if k > 1:
                A, G = state["A"].lerp(A, 1 - keep), state["G"].lerp(G, 1 - keep)
            state["A"], state["G"] = A, G
            # a factor that is zero (dead units, a solved batch) leaves pi undefined: use the damping alone
            mean_A, mean_G = (f.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(1e-30) for f in (A, G))
            pi = (mean_A / mean_G).sqrt()
            damped = _damped(A, pi * self.damping**0.5), _damped(G, self.damping**0.5 / pi)
            if seen.solve_only:
                state["A_inverse"], state["G_inverse"] = (torch.cholesky_inverse(_cholesky(f)) for f in damped)
            else:
                state["T_A"], state["T_G"] = (_whitening(f) for f in damped)
        state["step"] = state.get("step", 0) + 1
        if seen.solve_only:
            return Metric(inverse=(state["A_inverse"], state["G_inverse"]))
        return Metric(T_A=state["T_A"], T_G=state["T_G"])


@dataclass(frozen=True)
class EKFAC(_Kronecker):
    """EKFAC (George et al. 2018) with running second moments in the Kronecker eigenbasis.

    Every `refresh` steps the eigenbases of A and G of the current batch, and the products of their eigenvalues as the
    second moments m2; each step m2 <- decay m2 + (1 - decay) B g^2 with g the mean gradient of the loss (without weight
    decay) in that basis; M = m2 + damping.
    """

    damping: float = 0.03
    refresh: int = 10
    decay: float = 0.75

    def __post_init__(self) -> None:
        self._check(self.damping)
        require(0 <= self.decay < 1, "decay", self.decay, "in [0, 1)")

    def watches(self, state: State) -> bool:
        return True  # the batch size is needed in every step

    def observe(self, state: State, seen: Seen) -> Metric:
        assert seen.layer is not None
        assert seen.x is not None
        if self._due(state):
            A, G = _seen_factors(seen)
            (a, U_A), (g, U_G) = _eigh(A), _eigh(G)
            state["T_A"], state["T_G"] = U_A.mT.contiguous(), U_G.mT.contiguous()
            state["m2"] = g[:, :, None] * a[:, None, :]  # (g, O, J)
        B = seen.peers.batch(len(seen.x))
        gradient = state["T_G"] @ seen.layer.join(seen.gradient()) @ state["T_A"].mT * (seen.scale / B)
        state["m2"] = state["m2"] * self.decay + (1 - self.decay) * B * gradient.square()
        state["step"] = state.get("step", 0) + 1
        return Metric(T_A=state["T_A"], T_G=state["T_G"], D=[1 / (state["m2"] + self.damping)])


def _damped(factor: Tensor, damping: Tensor) -> Tensor:
    eye = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
    return factor + damping[:, None, None] * eye


def _cholesky(damped: Tensor) -> Tensor:
    L, failed = torch.linalg.cholesky_ex(damped)
    if failed.any():  # float32 has lost the small eigenvalues: repeat in float64
        L = torch.linalg.cholesky(damped.double()).to(damped.dtype)
    return L


def _whitening(damped: Tensor) -> Tensor:
    """T with T' T = damped^-1: the inverse of the Cholesky factor."""
    eye = torch.eye(damped.shape[-1], dtype=damped.dtype, device=damped.device)
    return torch.linalg.solve_triangular(_cholesky(damped), eye.expand_as(damped), upper=False)


def _eigh(factor: Tensor) -> tuple[Tensor, Tensor]:
    if not bool(factor.isfinite().all()):  # LAPACK would report an ill-conditioned matrix
        raise NonFiniteError("A Kronecker factor is not finite: V_h has diverged. Use a smaller lr.")
    values, vectors = eigh(factor)
    return values.clamp_min(0), vectors
