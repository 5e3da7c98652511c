"""The full form with V_xx in factors: V_xx = Z' Z with one row of Z for each column of the terminal curvature.

The same recursion as `full`, guard included, and the same numbers, but V_xx (B, n, n) is never formed: r rows per
sample (the classes, for the cross-entropy) go back through the network. With the stage's Gauss-Newton term in Q_uu

    C = (I + V_hh N)^-1 V_hh = Z' (I + Z N Z')^-1 Z = Y' Y,      Y = L^-1 Z,  L L' = I + Z N Z'

so that Z <- Y W, and only an r x r matrix is factorised. `vxx_reg` and the second-order terms add to V_xx in all
directions and need the full form.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ddpnopt.ddp.output_metric import output_metric
from ddpnopt.ddp.segment import Pullback
from ddpnopt.ddp.stage import Direction, Policy, Stage
from ddpnopt.ddp.value.chain import OnChain
from ddpnopt.linear.metric import Metric


class Factored(OnChain):
    """Per-sample value function with a Hessian of low rank, on a chain of layers."""

    def __init__(self, V_x: Tensor, Z: Tensor, segments: list[Pullback], planned: float = 1.0) -> None:
        super().__init__(V_x, segments)
        self.planned = planned  # eta of the recursion over that of the update
        self.Z = Z  # (B, r, n)
        self._traces: list[Tensor] = []  # of V_hh N at each stage

    @property
    def V_xx(self) -> Tensor:
        """As a matrix, for inspection: (B, n, n)."""
        return self.Z.mT @ self.Z

    def _pull(self, segment: Pullback) -> tuple[Tensor, Tensor]:
        return segment.pull_rows(self.V_x, self.Z)

    def backward(self, stage: Stage, metric: Metric) -> Policy:
        V_h, Y = self._h()
        self._at_h = None
        shape = stage.p_h[0].shape
        layer, x = stage.layer, stage.x
        if self.segments:  # there is a stage before this one
            Y = self._recurse(stage, metric, V_h, Y)

        def policy(x_hat: Tensor | None) -> Direction:
            V = V_h
            if x_hat is not None:
                Wdx = layer.apply(x_hat.to(x.dtype) - x, stage.u[:1]).flatten(1)
                V = V_h + _gram(Y, Wdx)
            return Direction(layer.grad(x, V.view(shape)), l_u=stage.l_u, peers=stage.peers)

        return policy

    def _recurse(self, stage: Stage, metric: Metric, V_h: Tensor, Z: Tensor) -> Tensor:
        """V_x and Z of the stage before; Y, which gives the feedback."""
        layer, x = stage.layer, stage.x
        eta = self.planned * stage.eta
        N = eta * output_metric(layer, x, metric)
        y = N * V_h if N.dim() == 2 else (N @ V_h[:, :, None])[:, :, 0]  # g_u (M/eta)^-1 Q_u
        if stage.l_u is not None:
            solved = [p * (eta / stage.batch) for p in metric.solve(layer, stage.l_u)]
            y = y + layer.apply(x, solved).flatten(1)
        A = (Z * N[:, None] if N.dim() == 2 else Z @ N) @ Z.mT
        diagonal = A.diagonal(dim1=1, dim2=2)
        self._traces.append(diagonal.sum(1))
        diagonal.add_(1)
        # I + a positive matrix: it fails only for numbers that are not finite, which is detected later
        Y = torch.linalg.solve_triangular(torch.linalg.cholesky_ex(A).L, Z, upper=False)
        V = V_h - _gram(Y, y)
        B, r = Z.shape[:2]
        outputs, inputs = stage.p_h[0].shape[1:], x.shape[1:]
        rows = layer.input_grad(Y.reshape(B * r, *outputs), stage.u[0], torch.Size((B * r, *inputs)))
        self.V_x = layer.input_grad(V.view(B, *outputs), stage.u[0], x.shape).flatten(1)
        self.Z = rows.reshape(B, r, -1)
        return Y

    @property
    def guarded_fraction(self) -> float:
        fractions = [(trace > 1).float().mean() for trace in self._traces]
        return float(torch.stack(fractions).mean()) if fractions else 0.0

    def predicted(self) -> float | None:
        return None


def _gram(Y: Tensor, v: Tensor) -> Tensor:
    """Y' Y v of each sample: (B, r, n), (B, n) -> (B, n)."""
    return (Y.mT @ (Y @ v[:, :, None]))[:, :, 0]
