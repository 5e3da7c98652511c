"""The batch-coupled form without scales: nothing in it has the unit of a loss, a weight or a learning rate.

Each layer works in balanced variables (`ddp.balance`), and eta_t is such that a step in which every sample's loss went
along its own gradient would change all layers by the same share of their weights,

    eta_t = |W_t| / (k_t / n_t)^1/2,       k_t the mean of lambda_i K_t[i, i],  n_t the number of weights

Rescaling the loss leaves the new network the same; without biases so does rescaling the inputs, or the weights of two
ReLU layers against each other (a bias acts on a constant input of 1, which has a scale).
The damping is relative to the mean diagonal d of A = L^1/2 S L^1/2 over all layers, and the same at all stages:
(A_t + DAMPING d I) y_t = alpha r + c_t, with r_i = (2 phi_i)^1/2 the residual of sample i.

The step is a ridge regression on the batch, and it remembers: its damping does not pull towards no step at all, but
towards a prior step m, what the last update has left undone,

    min over phi of |r - J phi|^2 + DAMPING d |phi - m|^2        phi = m + eta M^-1 P w,  (A + DAMPING d I) y = r - J m

Directions that this batch says nothing about keep what earlier batches have said (a Kaczmarz method on all of them).
Weight decay and penalties enter m as well.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ddpnopt._distributed import ALONE, Peers
from ddpnopt.ddp.balance import balanced
from ddpnopt.ddp.loss import sqrt_curvature
from ddpnopt.ddp.stage import Displacement, Stage, per_sample_dot
from ddpnopt.ddp.step_length import Evidence
from ddpnopt.ddp.value.batch import TOGETHER, Batch, Solver, System
from ddpnopt.ddp.value.coupling import Coupling
from ddpnopt.linear.layer import Parts
from ddpnopt.linear.metric import IDENTITY, Metric
from ddpnopt.linear.sample_gradients import SampleGradients

DAMPING = 0.02  # relative to the mean diagonal of A
LEAST_LOSS = 0.01  # of a sample, relative to the mean: one with a gradient and no loss does not block the others
LEAST_SIZE = 1e-3  # root mean square of a layer's weights: a layer that starts at zero can leave it


class ScaleFree(Batch):
    """Joint value function of the batch in balanced variables; `ask` sets the fraction after the backward pass."""

    def __init__(
        self, losses: Tensor, displacement: Displacement, peers: Peers = ALONE, memory: float = 0.0, watch: bool = True,
        least: float = LEAST_LOSS,
    ) -> None:  # fmt: skip
        mean = peers.total(float(losses.sum())) / peers.batch(len(losses))
        L = sqrt_curvature(losses.clamp_min(least * mean))
        super().__init__(L, torch.ones_like(L), displacement, 1, peers)
        self.memory = memory  # times the last update is the prior step
        self.watch = watch  # whether the slope along the last update is wanted in any case
        self._slope: float | None = None
        self._systems: list[System] = []  # of the stages, last to first
        self._stages: list[Stage] = []  # in the same order
        self._fraction = 1.0
        self._y: Tensor | None = None  # the solution at the first stage, for fraction 1
        self._first: Tensor | None = None  # the Cholesky factor there

    def prepare(self, stage: Stage) -> None:
        self._balance(stage)
        super().prepare(stage)

    def _balance(self, stage: Stage) -> None:
        if stage.balance is None:
            stage.balance = balanced(stage.layer, stage.x, stage.p_h[0], stage.state, stage.peers)

    def couple(self, stage: Stage, metric: Metric) -> tuple[SampleGradients, Solver]:
        self._balance(stage)
        own = stage.gradients(coupled=True)
        coupling = None if self.peers.alone else self._coupling or Coupling(stage)
        self._coupling = None
        effect = self._set_prior(stage)
        if coupling is None:
            K = own.gram(IDENTITY)
        else:
            if effect is None:  # another process may have one
                effect = stage.p_h[0].new_zeros(len(stage.p_h[0]))
            K, effect = coupling.gram(IDENTITY, effect)
        K = K.to(self.L.dtype)
        k = float(torch.vdot(self.L, K.diagonal()) / len(self.L))
        size = max(_root_mean_square(stage.u[0]), LEAST_SIZE)
        n = sum(part.numel() for part in stage.u)
        relative = size * (n / k) ** 0.5 if k > 0 else 0.0
        stage.eta *= relative
        if effect is not None:
            effect = effect.to(self.L.dtype)
            self.m = effect if self.m is None else self.m + effect
        system = self._extend(stage, K, None)
        self._systems.append(system)
        self._stages.append(stage)
        return own, partial(self._weights, system)

    def _set_prior(self, stage: Stage) -> Tensor | None:
        """Give the stage its prior step; what that does to the loss of each of our samples, to first order."""

        def effect_of(step: Parts) -> Tensor:
            return per_sample_dot(stage.p_h[0], stage.layer.apply(stage.x, step))

        prior: list[tuple[float, Parts]] = []
        effect = None
        last, penalty = stage.state.pop("update", None), _penalty_step(stage)
        if last is not None and (len(last) != len(stage.u) or last[0].dtype != stage.u[0].dtype):
            last = None  # a bias was frozen, or the precision changed
        if last is not None and (self.memory or self.watch):
            repeated = effect_of(last)
            self._slope = (self._slope or 0.0) - float(repeated.sum())
            if self.memory:
                prior.append((self.memory, last))
                effect = self.memory * repeated
        if penalty is not None:
            prior.append((1.0, penalty))
            own = effect_of(penalty)
            effect = own if effect is None else effect + own
        stage.prior, stage.l_u = prior, None
        return effect

    def forget(self) -> None:
        """Drop the prior step: the model of this batch says that it leads uphill, or the batch has no loss."""
        self.m = None
        for stage, system in zip(self._stages, self._systems, strict=True):
            stage.prior, system.m = [], None

    @property
    def slope(self) -> float | None:
        """The change of this batch's loss, to first order, if the last update were made again; None if not known."""
        if self._slope is None or self.peers.alone:
            return self._slope
        return self.peers.total(self._slope)

    def evidence(self) -> Evidence:
        """What a step that asks for all of the loss would do, to this batch and to samples left out of it."""
        assert self.S is not None
        r = self.target
        loss = 0.5 * float(r @ r)
        self._roots = torch.outer(self.root, self.root)
        A = self.S * self._roots
        self._damping = DAMPING * float(A.diagonal().mean()) or 1.0  # a batch without any gradient is left alone
        factor = self._first = self._factor(A)
        target = r if self.m is None else r - self.root * self.m
        y = self._y = torch.cholesky_solve(target[:, None], factor)[:, 0]
        achieved = r - self._damping * y  # J phi
        without = r - y / torch.cholesky_inverse(factor).diagonal()  # what the others alone would do to each sample
        if len(r) == 1:  # no others: exactly zero, not a rounding error of either sign
            without = torch.zeros_like(r)
        if loss <= 0:
            return Evidence(0.0, 0.0, 0.0, 0.0, 0.0)
        own, own2, unseen, unseen2 = torch.stack(
            [r @ achieved, achieved @ achieved, r @ without, without @ without]
        ).tolist()
        return Evidence(loss, own / loss, own2 / loss, unseen / loss, unseen2 / loss)

    def ask(self, fraction: float) -> None:
        """Ask for this fraction of each sample's loss, and of the prior step, in the forward sweep."""
        self._fraction = fraction
        self.target = self.target * fraction
        for stage, system in zip(self._stages, self._systems, strict=True):
            stage.fraction = fraction
            stage.state["penalty_rate"] = stage.eta / self._damping  # for the next step
            if system.m is not None:
                system.m = system.m * fraction
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
        c = -(self.S @ (self.root * self._y))
        c = self._fraction * (c if self.m is None else c - self.m)
        return float(c.sum() + 0.5 * (self.L * c) @ c)


def _penalty_step(stage: Stage) -> Parts | None:
    """The step down the stage cost alone, -(eta / damping) l_u, at most to zero: None without one.

    With s = eta / damping of the step before, 1 / s the curvature that damping adds to each weight, and l_u = lambda u
    it is u s lambda / (1 + s lambda), which does not overshoot for any lambda.
    """
    rate = stage.state.get("penalty_rate", 0.0)
    if stage.l_u is None or not rate:
        return None
    assert stage.balance is not None
    steps = []
    for u, scaled in zip(stage.u, stage.balance.scale(stage.balance.scale(stage.l_u)), strict=True):
        size = u.abs().clamp_min(LEAST_SIZE * max(_root_mean_square(u), LEAST_SIZE))
        steps.append(rate * scaled / (1 + rate * scaled.abs() / size))
    return steps


def _root_mean_square(a: Tensor) -> float:
    return float(torch.linalg.vector_norm(a)) / max(1, a.numel()) ** 0.5
