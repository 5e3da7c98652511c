"""The batch-coupled form without scales: nothing in it has the unit of a loss, a weight or a learning rate.

Each layer works in balanced variables (`ddp.balance`), and eta_t is such that a step in which every sample's loss went
along its own gradient would change all layers by the same share of their weights,

    eta_t = |W_t| / (k_t / n_t)^1/2,       k_t the mean of lambda_i K_t[i, i],  n_t the number of weights

Rescaling the loss leaves the new network the same; without biases so does rescaling the inputs, or the weights of two
ReLU layers against each other (a bias acts on a constant input of 1, which has a scale).
The damping is relative to the mean diagonal d of A = L^1/2 S L^1/2 over all layers, and the same at all stages:
(A_t + DAMPING d I) y_t = alpha r + c_t, with r_i = (2 phi_i)^1/2 the residual of sample i.
"""

from __future__ import annotations

from functools import partial
from statistics import median

import torch
from torch import Tensor

from ddpnopt._distributed import ALONE, Peers
from ddpnopt.ddp.balance import balanced
from ddpnopt.ddp.loss import sqrt_curvature
from ddpnopt.ddp.stage import Displacement, Stage, per_sample_dot
from ddpnopt.ddp.step_length import Evidence
from ddpnopt.ddp.value.batch import TOGETHER, Batch, Solver, System
from ddpnopt.ddp.value.coupling import Coupling
from ddpnopt.linear.layer import inner
from ddpnopt.linear.metric import IDENTITY, Metric
from ddpnopt.linear.sample_gradients import SampleGradients

DAMPING = 0.02  # relative to the mean diagonal of A
LEAST_LOSS = 1e-6  # of a sample, relative to the mean: the others keep their digits
LEAST_SIZE = 1e-3  # root mean square of a layer's weights: a layer that starts at zero can leave it


class ScaleFree(Batch):
    """Joint value function of the batch in balanced variables; `ask` sets the fraction after the backward pass."""

    def __init__(self, losses: Tensor, displacement: Displacement, peers: Peers = ALONE) -> None:
        mean = peers.total(float(losses.sum())) / peers.batch(len(losses))
        L = sqrt_curvature(losses.clamp_min(LEAST_LOSS * mean))
        super().__init__(L, torch.ones_like(L), displacement, 1, peers)
        self._systems: list[System] = []  # of the stages, last to first
        self._stages: list[Stage] = []
        self._ratios: list[float] = []  # eta k of each: what turns a stage's part of S into its relative update
        self._fraction = 1.0
        self._y: Tensor | None = None  # the solution at the first stage, for fraction 1
        self._first: Tensor | None = None  # the Cholesky factor there

    def prepare(self, stage: Stage) -> None:
        self._balance(stage)
        super().prepare(stage)

    def _balance(self, stage: Stage) -> None:
        if stage.balance is None:
            stage.balance = balanced(stage.layer, stage.x, stage.p_h[0], stage.state, stage.peers)
            if stage.l_u is not None:
                stage.l_u = stage.balance.scale(stage.l_u)

    def couple(self, stage: Stage, metric: Metric) -> tuple[SampleGradients, Solver]:
        self._balance(stage)
        assert stage.balance is not None
        own = stage.gradients(coupled=True)
        coupling = None if self.peers.alone else self._coupling or Coupling(stage)
        self._coupling = None
        dots = None
        if stage.l_u is not None:
            h = stage.layer.apply(stage.x, stage.balance.scale(stage.l_u))
            dots = per_sample_dot(stage.p_h[0], h)
        if coupling is None:
            K = own.gram(IDENTITY)
        else:
            K, dots = coupling.gram(IDENTITY, dots)
        K = K.to(self.L.dtype)
        k = float(torch.vdot(self.L, K.diagonal()) / len(self.L))
        size = max(float(stage.u[0].square().mean().sqrt()), LEAST_SIZE)
        n = sum(part.numel() for part in stage.u)
        relative = size * (n / k) ** 0.5 if k > 0 else 0.0
        stage.eta *= relative
        system = self._extend(stage, K, dots)
        self._systems.append(system)
        self._stages.append(stage)
        self._ratios.append(stage.eta * k)
        return own, partial(self._weights, system)

    def evidence(self) -> Evidence:
        """What a step that asks for all of the loss would do, to this batch and to samples left out of it."""
        assert self.S is not None
        r = self.target
        loss = 0.5 * float(r @ r)
        self._roots = torch.outer(self.root, self.root)
        A = self.S * self._roots
        self._damping = DAMPING * float(A.diagonal().mean()) or 1.0  # a batch without any gradient is left alone
        factor = self._first = self._factor(A)
        y = self._y = torch.cholesky_solve(r[:, None], factor)[:, 0]
        achieved = r - self._damping * y  # A y
        without = r - y / torch.cholesky_inverse(factor).diagonal()  # what the others alone would do to each sample
        if len(r) == 1:  # no others: exactly zero, not a rounding error of either sign
            without = torch.zeros_like(r)
        if loss <= 0:
            return Evidence(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        own, own2, unseen, unseen2 = torch.stack(
            [r @ achieved, achieved @ achieved, r @ without, without @ without]
        ).tolist()
        return Evidence(loss, own / loss, own2 / loss, unseen / loss, unseen2 / loss, self._relative_update(y))

    def _relative_update(self, y: Tensor) -> float:
        w = self.root * y
        forms = [float(w @ (system.S @ w)) for system in self._systems if system.S is not None]
        before = [0.0, *forms[:-1]]
        found = [
            max(0.0, form - less) / ratio
            for form, less, ratio in zip(forms, before, self._ratios, strict=True)
            if ratio > 0
        ]
        return median(found) ** 0.5 if found else 0.0

    def ask(self, fraction: float) -> None:
        """Ask for this fraction of each sample's loss in the forward sweep."""
        self._fraction = fraction
        self.target = self.target * fraction
        self._ask_of_stage_costs(fraction)
        assert self._roots is not None
        matrices = [system.S for system in self._systems if system.S is not None]
        for system in self._systems:
            system.S = None
        if len(self.L) > TOGETHER:
            self._systems[-1].cholesky = self._first
            for system, S in zip(self._systems[:-1], matrices, strict=False):
                system.cholesky = self._factor(S * self._roots)
            for system in self._systems:
                system.target = self.target
            return
        inverse = torch.cholesky_inverse(self._factor(torch.stack(matrices) * self._roots))
        for system, C in zip(self._systems, inverse.unbind(), strict=True):
            system.open_loop, system.gain = self.root * (C @ self.target), C * self._roots

    def _ask_of_stage_costs(self, fraction: float) -> None:
        """Let a penalty on the weights count as one more sample: its loss is <l_u, u>, its gradient l_u.

        That is the value of an absolute sum, and twice that of a sum of squares, without knowing which it is.
        """
        stages = [stage for stage in self._stages if stage.l_u is not None]
        if not stages:
            return
        value = squares = 0.0
        for stage in stages:
            assert stage.l_u is not None
            assert stage.balance is not None
            squares += stage.eta * float(inner(stage.l_u, stage.l_u))
            value += float(inner(stage.balance.unscale(stage.l_u), stage.u))
        own = squares / (2 * value) if value > 0 else 0.0  # L K of the penalty
        weight = fraction / max(own + self._damping, fraction)
        for stage in stages:
            assert stage.l_u is not None
            assert stage.balance is not None
            bounds = [u.abs() / (stage.eta or 1.0) for u in stage.balance.unscale(stage.u)]  # no weight changes sign
            stage.l_u = [torch.clamp(weight * part, -most, most) for part, most in zip(stage.l_u, bounds, strict=True)]
        for system in self._systems:
            system.m = None if system.m is None else weight * system.m

    def _factor(self, A: Tensor) -> Tensor:
        """The Cholesky factor of A + d I, with more damping where rounding asks for it."""
        d = self._damping
        A.diagonal(dim1=-2, dim2=-1).add_(d)
        factor, failed = torch.linalg.cholesky_ex(A)
        while bool(failed.any()) and d > 0 and bool(A.isfinite().all()):
            A.diagonal(dim1=-2, dim2=-1).add_(9 * d)
            d *= 10
            factor, failed = torch.linalg.cholesky_ex(A)
        return factor

    def predicted(self) -> float | None:
        assert self._y is not None
        assert self.S is not None
        c = -self._fraction * (self.S @ (self.root * self._y))
        return float(c.sum() + 0.5 * (self.L * c) @ c)
