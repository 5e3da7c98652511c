"""The Bellman pass of `bellman` with V_xx = F' K F of low rank: first order, and nothing added to V_xx.

A Hessian over C classes has rank C at most and keeps it through all layers, so that the guard solves systems of C and
not of the layer's width; with z z' of one. Shapes: F (R, B, k, O), K (R, B, k, k).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddpnopt.lab.runs.stacked.bellman import BellmanStage, Policy, times, without
from ddpnopt.lab.runs.stacked.network import derivative
from ddpnopt.lab.runs.stacked.recipe import Recipe
from ddpnopt.linear.metric import Metric


def applies(recipe: Recipe, own: Mapping[str, Tensor]) -> bool:
    """Second order and eps on V_xx make it a matrix of full rank."""
    return recipe.order == 1 and not bool(own["vxx_reg"].any())


def factored_policies(
    kinds: Sequence[str], U: Sequence[Tensor], own: Mapping[str, Tensor], recipe: Recipe, xs: Sequence[Tensor],
    outs: Sequence[Tensor], V_x: Tensor, root: Tensor, observe: Callable[[int, Tensor], Metric],
) -> tuple[Tensor, list[tuple[Policy, Metric]]]:  # fmt: skip
    """As `bellman.policies`, with V_xx = root' root at the outputs."""
    wrong = V_x.new_zeros(len(V_x), dtype=torch.bool)
    eta = own["lr"][:, None, None] * recipe.planned_share(V_x.shape[1])
    made: list[tuple[Policy, Metric]] = []
    F, K = root, None
    for t in reversed(range(len(xs))):
        bend = derivative(kinds[t], outs[t])
        V_h = V_x if bend is None else bend * V_x
        F = F if bend is None else bend[:, :, None, :] * F
        wrong, V_h, F = without(wrong, V_h, F)
        metric = observe(t, V_h)
        stage = BellmanStage(U[t][:, :, :-1], xs[t], V_h, metric, eta)
        gain = None
        if t > 0:
            S = stage.S
            FN = _rotated(F, metric) * S.sqrt()[:, :, None, :]
            P = FN @ FN.mT
            if recipe.guard:
                F = _solved(P, F)
                gain = _Gain(F, None)
            else:
                gain = _Gain(F, K)
                K = _identity(P) - P if K is None else K - K @ P @ K
            y = stage.N(S, V_h[:, :, :, None])
            V_x = (V_h - gain.times(y)[:, :, :, 0]) @ stage.W
            F = times(F, stage.W)
        made.append((_policy(stage, gain), metric))
    return wrong, made[::-1]


@dataclass(frozen=True, eq=False)
class _Gain:
    """F' K F, with K = I if there is none."""

    F: Tensor
    K: Tensor | None

    def times(self, v: Tensor) -> Tensor:
        inner = self.F @ v
        return self.F.mT @ (inner if self.K is None else self.K @ inner)


def _rotated(F: Tensor, metric: Metric) -> Tensor:
    return F if metric.T_G is None else times(F, metric.T_G.mT)


def _identity(like: Tensor) -> Tensor:
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)


def _solved(P: Tensor, F: Tensor) -> Tensor:
    """(I + V N)^-1 V = F' (I + P)^-1 F as the square of the result; P is never indefinite."""
    if P.shape[-1] == 1:
        return F * (1 + P).rsqrt()
    factor, _ = torch.linalg.cholesky_ex(P + _identity(P))
    return torch.linalg.solve_triangular(factor, F, upper=False)


def _policy(stage: BellmanStage, gain: _Gain | None) -> Policy:
    def policy(x_hat: Tensor) -> Tensor:
        V = stage.V_h
        if gain is not None:
            dx = (x_hat - stage.x)[:, :, :-1]
            V = V + gain.times((dx @ stage.W.mT)[:, :, :, None])[:, :, :, 0]
        return V.mT @ stage.x

    return policy
