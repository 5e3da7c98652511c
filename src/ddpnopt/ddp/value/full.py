"""The paper's form for feedforward networks: V_x and V_xx of each sample, Algorithm 3 with eq. 12.

With N = eta g_u M^-1 g_u' (an n_h x n_h matrix, diagonal for a linear layer with diagonal M) neither Q_ux nor K is
ever formed:

    V_x  = W' (V_h  - V_hh (N V_h + n))          n = eta g_u M^-1 l_u / B
    V_xx = W' (V_hh - V_hh N V_hh) W + eps I
    d(dx) = l_u + sum_i g_u' (V_h + V_hh W dx)

The guard keeps the stage's own Gauss-Newton term in Q_uu for all that concerns feedback: in the recursion the bracket
V_hh - V_hh N V_hh becomes C = (I + V_hh N)^-1 V_hh, and in K V_hh becomes C, too. k is unchanged, so that without
feedback the base optimizer remains. Where each sample plans for itself (`vxx_power=0`) eta of the recursion, in N and
n, is B times that of the update: V_x and V_xx here are the sample's own over B. Second order (eq. 26) adds
V_x . sigma_hh to V_hh and V_h . g_ux to Q_ux.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ddpnopt._checks import ADVICE, require_finite
from ddpnopt.ddp.output_metric import mixed_terms, output_metric
from ddpnopt.ddp.segment import Pullback
from ddpnopt.ddp.stage import Direction, Policy, Stage
from ddpnopt.ddp.value.chain import OnChain
from ddpnopt.linear.eigen import eigh
from ddpnopt.linear.layer import Parts
from ddpnopt.linear.metric import Metric


class Full(OnChain):
    """Per-sample value function with a full Hessian, on a chain of layers."""

    def __init__(
        self, V_x: Tensor, V_xx: Tensor, segments: Sequence[Pullback], *, order: int, guard: bool, vxx_reg: float,
        planned: float = 1.0,
    ) -> None:  # fmt: skip
        super().__init__(V_x, segments)
        self.V_xx = V_xx  # (B, n, n)
        self.order, self.guard, self.vxx_reg = order, guard, vxx_reg
        self.planned = planned  # eta of the recursion over that of the update
        self._over: list[tuple[Tensor, Tensor]] = []  # V and N of each stage, for diagnostics

    def _pull(self, segment: Pullback) -> tuple[Tensor, Tensor]:
        return segment.pull(self.V_x, self.V_xx, self.order)

    def backward(self, stage: Stage, metric: Metric) -> Policy:
        V_h, V_hh = self._h()
        self._at_h = None
        shape = stage.p_h[0].shape
        layer, x = stage.layer, stage.x
        gain, mixed = V_hh, None  # K dx adds g_u' (gain W dx - mixed dx) (and V_h . g_ux dx for order 2) to d
        if self.segments:  # there is a stage before this one
            gain, mixed = self._recurse(stage, metric, V_h, V_hh)

        def policy(x_hat: Tensor | None) -> Direction:
            if x_hat is None:
                return Direction(layer.grad(x, V_h.view(shape)), l_u=stage.l_u, peers=stage.peers)
            dx = x_hat.to(x.dtype) - x
            V = V_h + (gain @ layer.apply(dx, stage.u[:1]).flatten(1)[:, :, None])[:, :, 0]
            if mixed is not None:
                V = V - (mixed @ dx.flatten(1)[:, :, None])[:, :, 0]
            d = layer.grad(x, V.view(shape))
            if self.order == 2:
                d[0] = d[0] + layer.grad(dx, V_h.view(shape))[0]
            return Direction(d, l_u=stage.l_u, peers=stage.peers)

        return policy

    def _recurse(self, stage: Stage, metric: Metric, V_h: Tensor, V_hh: Tensor) -> tuple[Tensor, Tensor | None]:
        """V_x and V_xx of the stage before; the matrices of the feedback."""
        layer, x = stage.layer, stage.x
        eta = self.planned * stage.eta
        N = eta * output_metric(layer, x, metric)
        y = _apply(N, V_h[:, :, None])  # g_u (M/eta)^-1 Q_u, (B, n_h, 1)
        solved = None
        if stage.l_u is not None:
            solved = [p * (eta / stage.batch) for p in metric.solve(layer, stage.l_u)]
            y = y + layer.apply(x, solved).flatten(1)[:, :, None]
        # C: what the guard's Woodbury correction puts between the two sides
        C = None
        if self.guard:
            V = V_hh if self.order == 1 else _positive(V_hh)
            C = _guarded(V, N)
            self._over.append((V, N))
        mixed = None
        if self.order == 1:
            gain = V_hh if C is None else C
            kept = V_hh - V_hh @ _apply(N, V_hh) if C is None else C
            self.V_x = self._times_W(stage, (V_h[:, :, None] - gain @ y).mT)[:, 0]
            self.V_xx = self._times_W(stage, self._times_W(stage, kept).mT)
        else:
            gain = V_hh if C is None else V_hh - C @ _apply(N, V_hh)
            mixed = self._recurse_second_order(stage, metric, V_h, V_hh, N, y, C, solved)
            self.V_xx = 0.5 * (self.V_xx + self.V_xx.mT)  # differences of products: symmetric up to rounding only
        if self.vxx_reg:
            self.V_xx.diagonal(dim1=1, dim2=2).add_(self.vxx_reg)
        return gain, mixed

    def _recurse_second_order(
        self, stage: Stage, metric: Metric, V_h: Tensor, V_hh: Tensor, N: Tensor, y: Tensor,
        C: Tensor | None, solved: Parts | None,
    ) -> Tensor | None:  # fmt: skip
        """Eq. 5 with Q_ux = g_u' V_hh W + E, E = V_h . g_ux, S = (M/eta)^-1; what the guard subtracts from E in K."""
        V = V_h.view_as(stage.p_h[0])
        NE, EE = (self.planned * stage.eta * term for term in mixed_terms(stage.layer, stage.x, V, metric))
        VW = self._times_W(stage, V_hh)
        NQ = _apply(N, VW) + NE  # g_u S Q_ux
        QQ = VW.mT @ NQ + NE.mT @ VW + EE  # Q_ux' S Q_ux
        Qq = VW.mT @ y + NE.mT @ V_h[:, :, None]  # Q_ux' S Q_u
        if solved is not None:  # E' S l_u / B: its weights seen as a map of dx, against V_h
            pulled = stage.layer.input_grad(V, solved[0], stage.x.shape)
            Qq = Qq + pulled.flatten(1)[:, :, None]
        if C is not None:
            Qq = Qq - NQ.mT @ (C @ y)
            QQ = QQ - NQ.mT @ (C @ NQ)
        self.V_x = self._times_W(stage, V_h[:, None])[:, 0] - Qq[:, :, 0]
        self.V_xx = self._times_W(stage, VW.mT) - QQ
        return None if C is None else C @ NE

    @staticmethod
    def _times_W(stage: Stage, V: Tensor) -> Tensor:
        """V W: (B, k, n_h) -> (B, k, n_x)."""
        B, k = V.shape[:2]
        rows = V.reshape(B * k, *stage.p_h[0].shape[1:])
        shape = torch.Size((B * k, *stage.x.shape[1:]))
        return stage.layer.input_grad(rows, stage.u[0], shape).reshape(B, k, -1)

    @property
    def guarded_fraction(self) -> float:
        fractions = [(_trace(V, N) > 1).float().mean() for V, N in self._over]
        return float(torch.stack(fractions).mean()) if fractions else 0.0

    def predicted(self) -> float | None:
        return None


def _apply(N: Tensor, V: Tensor) -> Tensor:
    """N V for N diagonal (B, n) or (B, 1), or full (B, n, n), V (B, n, k)."""
    return N[:, :, None] * V if N.dim() == 2 else N @ V


def _guarded(V: Tensor, N: Tensor) -> Tensor:
    """(I + V N)^-1 V for V >= 0, symmetric."""
    if N.dim() == 3:
        VN = V @ N
        VN.diagonal(dim1=1, dim2=2).add_(1)
        return torch.linalg.solve(VN, V)
    if N.shape[1] == 1:  # a multiple of I, which commutes with V
        A = N[:, :, None] * V
        A.diagonal(dim1=1, dim2=2).add_(1)
        factor, failed = torch.linalg.cholesky_ex(A)
        return torch.linalg.solve(A, V) if bool(failed.any()) else torch.cholesky_solve(V, factor)
    # N diagonal: V - V R (I + R V R)^-1 R V with R = N^1/2, by Cholesky
    R = N.sqrt()
    RV = R[:, :, None] * V
    A = RV * R[:, None, :]
    A.diagonal(dim1=1, dim2=2).add_(1)
    factor, failed = torch.linalg.cholesky_ex(A)
    if bool(failed.any()):  # rounding has made V indefinite
        return torch.linalg.solve(A * (R[:, None, :] / R[:, :, None].clamp_min(1e-30)), V)
    Y = torch.linalg.solve_triangular(factor, RV, upper=False)
    return V - Y.mT @ Y


def _trace(V: Tensor, N: Tensor) -> Tensor:
    diagonal = N * V.diagonal(dim1=1, dim2=2) if N.dim() == 2 else N * V.mT
    return diagonal.flatten(1).sum(1)


def _positive(V: Tensor) -> Tensor:
    """V without its negative eigenvalues."""
    require_finite([V], "V_xx", ADVICE)  # eigh would report a failure to converge
    values, vectors = eigh(V)
    return (vectors * values.clamp_min(0)[:, None, :]) @ vectors.mT
