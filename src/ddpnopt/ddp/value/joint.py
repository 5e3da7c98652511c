"""The batch-coupled form for losses with derivatives of the network: one joint step of all layers, without feedback.

A forward sweep sees the new activations but not the new derivatives, so that no layer can react to those before it.
All layers share one system instead, that of the first stage,

    (A + lambda d I) y = r - J m        phi = m + eta P w,  w = L^1/2 y

with d the mean diagonal of A and r_i = (2 phi_i)^1/2 the residuals. For a squared residual of each sample this is the
Gauss-Newton method of Levenberg and Marquardt, and lambda follows how far the linear model holds (`ddp.trust`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ddpnopt.ddp.balance import Diagonal
from ddpnopt.ddp.stage import Displacement, Stage
from ddpnopt.ddp.value.batch import System
from ddpnopt.ddp.value.scale_free import ScaleFree

LEAST_SQUARE = 1e-12  # loss of a sample relative to the mean: the gradient of a residual is known next to its zero


class Joint(ScaleFree):
    """Joint value function of a step in which no layer reacts to another."""

    feels_slopes = False  # the damping follows the loss

    def __init__(self, losses: Tensor, memory: float = 0.0, least: float = LEAST_SQUARE) -> None:
        super().__init__(losses, Displacement(chain=True), memory=memory, least=least)

    def _balance(self, stage: Stage) -> None:
        if stage.balance is None:
            # a weight that is used transposed, too, has no features of its own on either side
            weights = stage.weights  # not the stage, which will have what is made here
            stage.balance = Diagonal(None, None, lambda: [torch.ones_like(part) for part in weights])

    def solve(self, damping: float, fraction: float) -> float:
        """Solve the system for a damping relative to the mean diagonal of A; the step is a fraction of the solution.

        Returns the loss that the linear model predicts for the same batch after the step.
        """
        self._assemble(damping)
        assert self.S is not None
        r = self.target
        A = self.S * torch.outer(self.root, self.root)
        self._damping = damping * self._mean_diagonal or 1.0  # a batch without any gradient is left alone
        y = self._factor(A).solve(self._less(r, self.m))
        after = r + fraction * (self._damping * y - r)
        self._y = fraction * y
        self._take(fraction)
        return 0.5 * float(after @ after)

    def _weights(self, system: System, c: Tensor | None) -> Tensor:
        assert self._y is not None
        return self.root * self._y
