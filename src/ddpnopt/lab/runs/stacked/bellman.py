"""The backward Bellman pass of R networks: `ddpnopt.ddp.value.full`, with all its options, for a stack.

Shapes: x~ (R, B, J), weights U (R, O, J), V_h (R, B, O), V_hh (R, B, O, O).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddpnopt.lab.runs.stacked.network import derivative, second_derivative
from ddpnopt.lab.runs.stacked.recipe import Recipe
from ddpnopt.linear.metric import Metric

Policy = Callable[[Tensor], Tensor]
"""Q_u + Q_ux dx (R, O, J) for the new inputs x~^."""


def policies(
    kinds: Sequence[str], U: Sequence[Tensor], own: Mapping[str, Tensor], recipe: Recipe, xs: Sequence[Tensor],
    outs: Sequence[Tensor], V_x: Tensor, V_xx: Tensor, observe: Callable[[int, Tensor], Metric],
) -> tuple[Tensor, list[tuple[Policy, Metric]]]:  # fmt: skip
    """Which runs have gone wrong, and the policy and M of each layer, the first one first.

    `observe` brings M of a layer up to date, given V_h.
    """
    wrong = V_x.new_zeros(len(V_x), dtype=torch.bool)
    eta = own["lr"][:, None, None] * recipe.planned_share(V_x.shape[1])
    made: list[tuple[Policy, Metric]] = []
    for t in reversed(range(len(xs))):
        V_h, V_hh = _through_activation(kinds[t], outs[t], V_x, V_xx, recipe.order)
        wrong, V_h, V_hh = without(wrong, V_h, V_hh)
        metric = observe(t, V_h)
        stage = BellmanStage(U[t][:, :, :-1], xs[t], V_h, metric, eta)
        gains = None
        if t > 0:
            recurse = _first_order if recipe.order == 1 else _second_order
            V_x, V_xx, gains = recurse(stage, V_hh, recipe.guard)
            V_xx.diagonal(dim1=2, dim2=3).add_(own["vxx_reg"][:, None, None])
        made.append((_policy(stage, gains, recipe.order), metric))
    return wrong, made[::-1]


def _through_activation(kind: str, out: Tensor, V_x: Tensor, V_xx: Tensor, order: int) -> tuple[Tensor, Tensor]:
    bend = derivative(kind, out)
    if bend is None:
        return V_x, V_xx
    V_h, V_hh = bend * V_x, bend[:, :, :, None] * V_xx * bend[:, :, None, :]
    second = second_derivative(kind, out) if order == 2 else None
    if second is not None:
        V_hh.diagonal(dim1=2, dim2=3).add_(V_x * second)
    return V_h, V_hh


@dataclass(frozen=True, eq=False)
class BellmanStage:
    """One layer, and N = eta g_u M^-1 g_u' = T' diag(S) T of each sample."""

    W: Tensor
    x: Tensor
    V_h: Tensor
    metric: Metric
    eta: Tensor

    @property
    def S(self) -> Tensor:
        D = None if self.metric.D is None else self.metric.D[0]
        x = self.x if self.metric.T_A is None else self.x @ self.metric.T_A.mT
        squares = x.square()
        S = squares.sum(2, keepdim=True) if D is None else squares @ D.mT
        return (self.eta * S).expand_as(self.V_h)

    def N(self, S: Tensor, V: Tensor) -> Tensor:
        """N V: (R, B, O, k)."""
        T = self.metric.T_G
        if T is None:
            return S[:, :, :, None] * V
        return T.mT[:, None] @ (S[:, :, :, None] * (T[:, None] @ V))

    def guarded(self, S: Tensor, V: Tensor) -> Tensor:
        """C = (I + V N)^-1 V = V - V root' (I + root V root')^-1 root V with N = root' root."""
        root = S.sqrt()
        if self.metric.T_G is None:
            RV = root[:, :, :, None] * V
            A = RV * root[:, :, None, :]
        else:
            both = root[:, :, :, None] * self.metric.T_G[:, None]
            RV = both @ V
            A = RV @ both.mT
        A.diagonal(dim1=2, dim2=3).add_(1)
        factor, failed = torch.linalg.cholesky_ex(A)
        if bool(failed.any()):  # rounding has made V indefinite: A is still symmetric, but only LU can do it
            Z, _ = torch.linalg.solve_ex(A, RV)
            return V - RV.mT @ Z
        Y = torch.linalg.solve_triangular(factor, RV, upper=False)
        return V - Y.mT @ Y


Gains = tuple[Tensor, Tensor | None]
"""What W dx and, for second order with the guard, dx are multiplied by."""


def _first_order(stage: BellmanStage, V_hh: Tensor, guard: bool) -> tuple[Tensor, Tensor, Gains]:
    S, W, V_h = stage.S, stage.W, stage.V_h
    y = stage.N(S, V_h[:, :, :, None])
    if guard:
        gain = kept = stage.guarded(S, V_hh)
    else:
        gain, kept = V_hh, V_hh - V_hh @ stage.N(S, V_hh)
    V_x = (V_h - (gain @ y)[:, :, :, 0]) @ W
    return V_x, times(times(kept, W).mT, W), (gain, None)


def _second_order(stage: BellmanStage, V_hh: Tensor, guard: bool) -> tuple[Tensor, Tensor, Gains]:
    """Eq. 5 with Q_ux = g_u' V_hh W + E, E = V_h . g_ux."""
    S, W, V_h = stage.S, stage.W, stage.V_h
    y = stage.N(S, V_h[:, :, :, None])
    NE, EE = _mixed(stage)
    VW = times(V_hh, W)
    NQ = stage.N(S, VW) + NE
    QQ = VW.mT @ NQ + NE.mT @ VW + EE
    Qq = VW.mT @ y + NE.mT @ V_h[:, :, :, None]
    gain, mixed = V_hh, None
    if guard:
        values, vectors = torch.linalg.eigh(V_hh)
        C = stage.guarded(S, (vectors * values.clamp_min(0)[:, :, None, :]) @ vectors.mT)
        Qq = Qq - NQ.mT @ (C @ y)
        QQ = QQ - NQ.mT @ (C @ NQ)
        gain, mixed = V_hh - C @ stage.N(S, V_hh), C @ NE
    V_xx = times(VW.mT, W) - QQ
    return V_h @ W - Qq[:, :, :, 0], 0.5 * (V_xx + V_xx.mT), (gain, mixed)


def _mixed(stage: BellmanStage) -> tuple[Tensor, Tensor]:
    """eta g_u M^-1 E (R, B, O, n) and eta E' M^-1 E (R, B, n, n)."""
    metric, n = stage.metric, stage.W.shape[2]
    X = stage.x if metric.T_A is None else stage.x @ metric.T_A.mT
    a = stage.V_h if metric.T_G is None else stage.V_h @ metric.T_G.mT
    eye = torch.eye(X.shape[2], dtype=X.dtype, device=X.device)[None]
    T = (eye if metric.T_A is None else metric.T_A)[:, :, :n]
    if metric.D is None:
        NE = a[:, :, :, None] * (X @ T)[:, :, None, :]
        EE = a.square().sum(2)[:, :, None, None] * (T.mT @ T)[:, None]
    else:
        D = metric.D[0]
        NE = a[:, :, :, None] * ((X[:, :, None, :] * D[:, None]) @ T[:, None])
        EE = T.mT[:, None] @ ((a.square() @ D)[:, :, :, None] * T[:, None])
    if metric.T_G is not None:
        NE = metric.T_G.mT[:, None] @ NE
    eta = stage.eta[:, :, :, None]
    return eta * NE, eta * EE


def _policy(stage: BellmanStage, gains: Gains | None, order: int) -> Policy:
    def policy(x_hat: Tensor) -> Tensor:
        V = stage.V_h
        if gains is None:
            return V.mT @ stage.x
        gain, mixed = gains
        change = x_hat - stage.x  # the constant input does not move
        dx = change[:, :, :-1]
        V = V + (gain @ (dx @ stage.W.mT)[:, :, :, None])[:, :, :, 0]
        if mixed is not None:
            V = V - (mixed @ dx[:, :, :, None])[:, :, :, 0]
        d = V.mT @ stage.x
        return d if order == 1 else d + stage.V_h.mT @ change

    return policy


def times(V: Tensor, W: Tensor) -> Tensor:
    """V W for each run: (R, B, k, n), (R, n, m) -> (R, B, k, m)."""
    R, B, k, n = V.shape
    return torch.bmm(V.reshape(R, B * k, n), W).view(R, B, k, -1)


def finite(x: Tensor) -> Tensor:
    """Which runs have only finite numbers: a sum shows it, and reads the tensor once."""
    return x.flatten(1).sum(1).isfinite()


def without(wrong: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
    """Puts zeros instead of runs that are not finite, for which an eigendecomposition would raise an error."""
    now = ~torch.stack([finite(part) for part in parts]).all(0)
    if bool(now.any()):
        parts = tuple(
            torch.where(now.view(-1, *[1] * (part.dim() - 1)), torch.zeros_like(part), part) for part in parts
        )
    return (wrong | now, *parts)
