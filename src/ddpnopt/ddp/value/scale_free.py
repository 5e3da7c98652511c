"""The batch-coupled form without scales: nothing in it has the unit of a loss, a weight or a learning rate.

Each layer works in balanced variables (`ddp.balance`), and eta_t is such that a step in which every sample's loss went
along its own gradient would change all layers by the same share of their weights,

    eta_t = |W_t| / (k_t / n_t)^1/2,       k_t the mean of lambda_i K_t[i, i],  n_t the number of weights

corrected by how far the last update of each layer has gone (`ddp.value.shares`).
Rescaling the loss leaves the new network the same; without biases so does rescaling the inputs, or the weights of two
ReLU layers against each other. With them it changes little: the constant input of a bias counts as large as the others.
The damping is relative to the mean diagonal d of A = L^1/2 S L^1/2 over all layers, and the same at all stages:
(A_t + DAMPING d I) y_t = alpha r + c_t, with r_i = (2 phi_i)^1/2 the residual of sample i.

The step is a ridge regression on the batch, and it remembers: its damping does not pull towards no step at all, but
towards a prior step m, what the last update has left undone,

    min over phi of |r - J phi|^2 + DAMPING d |phi - m|^2        phi = m + eta M^-1 P w,  (A + DAMPING d I) y = r - J m

Directions that this batch says nothing about keep what earlier batches have said (a Kaczmarz method on all of them).
Weight decay and penalties enter m as well (`ddp.value.stage_cost`).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ddpnopt._distributed import ALONE, Peers
from ddpnopt.ddp.balance import balanced, look
from ddpnopt.ddp.balanced import Scaled
from ddpnopt.ddp.loss import sqrt_curvature
from ddpnopt.ddp.stacked import Stacked
from ddpnopt.ddp.stage import Displacement, Stage
from ddpnopt.ddp.step_length import Evidence
from ddpnopt.ddp.value import shares
from ddpnopt.ddp.value.batch import TOGETHER, Batch, Solver, System
from ddpnopt.ddp.value.coupling import Coupling
from ddpnopt.ddp.value.priors import Priors
from ddpnopt.ddp.value.reactions import Reactions
from ddpnopt.ddp.value.sizes import numbers, set_sizes
from ddpnopt.ddp.value.stage_cost import CostChange
from ddpnopt.linear.cholesky import Cholesky, cholesky
from ddpnopt.linear.layer import in_precision, per_sample_dot
from ddpnopt.linear.metric import IDENTITY, Metric
from ddpnopt.linear.sample_gradients import Sums

if TYPE_CHECKING:
    from ddpnopt.ddp.sweep import Replay

DAMPING = 1.0  # relative to the mean diagonal of A
LEAST_LOSS = 0.01  # of a sample, relative to the mean: one with a gradient and no loss does not block the others


class ScaleFree(Batch):
    """Joint value function of the batch in balanced variables; `ask` sets the fraction after the backward pass."""

    feels_slopes = True  # along the last update of each layer
    planned = False  # whether all stages take the solution at the first one, without a forward pass (`ddp.rollouts`)

    def __init__(
        self, losses: Tensor, displacement: Displacement, peers: Peers = ALONE, memory: float = 0.0, cost: float = 0.0,
        penalty: float = 0.0, total: float | None = None, least: float = LEAST_LOSS,
    ) -> None:  # fmt: skip
        """From the losses of the samples here; `total` is their sum, where it is known."""
        mean = peers.total(float(losses.sum()) if total is None else total) / peers.batch(losses.shape[0])
        losses = losses.clamp_min(least * mean)
        if peers.alone and losses.dtype.itemsize >= 4 and least * mean > torch.finfo(losses.dtype).tiny:
            r = losses.add_(losses).sqrt_()  # all are positive
            root = r.reciprocal()
            super().__init__(root * root, r, displacement, residuals=(root, r))
        else:
            L = sqrt_curvature(losses)
            super().__init__(L, torch.ones_like(L), displacement, 1, peers)
        self._cost = CostChange(cost)  # of all stages
        self._priors = Priors(memory, self._cost, penalty, peers, feels_slopes=self.feels_slopes)
        # of the stages, last to first
        self._stages: list[Stage] = []
        self._systems: list[System] = []
        self._grams: list[Tensor] | Tensor = []  # K
        self._stacked: Stacked | None = None  # all of them as one
        self._etas: list[float] = []  # before the stage cost has left its part to the samples
        self._eta: Tensor | None = None  # what it has left, (T, 1, 1), for a small batch
        self._sides: tuple[Tensor, Tensor] | None = None  # sums and diagonals of eta K, (T, N)
        self._effects: Tensor | None = None  # of the prior of each stage, on each sample's loss, (T, N)
        self._slope: float | None = None
        self._sums: Tensor | None = None  # S of all stages, (T, N, N), for a small batch
        self._mean_diagonal = 0.0  # of A at the first stage, without the curvature of the stage cost
        self._damping = 1.0
        self._fraction = 1.0
        self._y: Tensor | None = None  # the solution at the first stage, for fraction 1
        self._ys: Tensor | None = None  # those at all stages, (T, N), for a small batch
        self._first: Cholesky | None = None  # the factor there
        self._inverse: Tensor | None = None  # of the matrix there, (N, N), or of those of all stages, (T, N, N)
        self._plan: Tensor | None = None  # the weights of the samples by the solution at the first stage
        self._reactions: Reactions | None = None  # … and by those of the stages that react to their new inputs

    def prepare(self, stage: Stage) -> None:
        self._balance(stage)
        super().prepare(stage)

    def _balance(self, stage: Stage) -> None:
        if stage.balance is None:
            stage.balance = balanced(stage.layer, stage.x, stage.p_h[0], stage.state, stage.peers, stage.name)

    def couple(self, stage: Stage, metric: Metric) -> tuple[Sums, Solver]:
        self._balance(stage)
        assert stage.balance is not None
        own: Sums
        l_u = stage.l_u
        if self.peers.alone:
            own = gradients = stage.balanced_gradients()
            steps, cost = self._priors.steps_of(stage)
            K, found = gradients.couple([step for _, step in steps] + cost)
            effects = self._priors.effects_of(stage, l_u, steps, found)
        else:
            coupling, sketched = self._coupling or Coupling(stage), stage.sketched
            self._coupling = None
            steps, cost = self._priors.steps_of(stage)
            p, layer = stage.p_h[0], stage.layer
            asked = [step for _, step in steps] + cost
            if sketched is not None:
                own, found = sketched, [sketched.effect(step) for step in asked]
            else:
                own = Scaled(stage.gradients(coupled=True), stage.balance)
                found = [per_sample_dot(p, layer.apply(stage.x, step)) for step in asked]
            effects = self._priors.effects_of(stage, l_u, steps, found)
            mine = p.new_zeros(len(p))  # another process may have a prior where this one has none
            for share, effect in effects:
                mine = mine + share * effect
            K, gathered = coupling.gram(IDENTITY, mine)
            assert gathered is not None
            effects = [(1.0, gathered)]
        system = System(None, stage.state, None)
        assert isinstance(self._grams, list)
        self._stages.append(stage)
        self._systems.append(system)
        self._grams.append(in_precision(K, self.L.dtype))
        self._priors.add(effects)
        return own, partial(self._weights, system)

    def backward_together(self, stages: list[Stage], stacked: Stacked) -> None:
        """All stages as one, last to first, none of which has a stage cost."""
        for stage in stages:
            look(stage.layer, stage.x, stage.p_h[0], stage.state, stage.peers, stage.name)
        stacked.load(stages, self._priors.last_of(stages))
        self._grams, effects = stacked.couple()
        self._priors.repeat(effects)
        self._stages, self._stacked = stages, stacked
        if not self.planned:
            self._systems = [System(None, stage.state, None) for stage in stages]

    def update_together(self, replay: Replay | None) -> list[Tensor] | None:
        """Update all layers by the plan, or each as it reacts to its new input in the replay; the new outputs."""
        assert self._stacked is not None
        first = self._stages[0]
        share = first.fraction * first.prior[0][0] if first.prior else 0.0
        if replay is not None:
            return self._stacked.roll_out(self._stages, replay, self.displacement, self._weights_at, share)
        assert self._plan is not None
        assert self._eta is not None
        self._stacked.change(self._stages, *self._stacked.updates(self._eta * self._plan.unsqueeze(1), share))
        return None

    def _weights_at(self, t: int, c: Tensor | None) -> Tensor:
        return self._weights(self._systems[t], c)

    def _assemble(self, damping: float = DAMPING) -> None:
        """The shares eta of the layers, and with them S and m of all stages."""
        grams, self._grams = self._grams, []
        if isinstance(grams, list) and not grams:
            return
        N = self.L.shape[0]
        together = grams if isinstance(grams, Tensor) else torch.stack(grams) if N <= TOGETHER else None
        if together is not None:
            diagonals = torch.diagonal(together, dim1=1, dim2=2)
        else:
            diagonals = torch.stack([K.diagonal() for K in grams])
        k = torch.mv(diagonals, self.L)
        slopes = self._priors.slopes(self.L)
        if slopes is not None:
            self._slope = sum(slopes)
            shares.correct(self._stages, slopes)
        means = [total / N for total in k.tolist()]
        set_sizes(self._stages, means, self.target, None if self._stacked is None else self._stacked.sizes())
        for stage, mean in zip(self._stages, means, strict=True):
            stage.eta *= stage.size * (numbers(stage) / mean) ** 0.5 if mean > 0 else 0.0
            self._etas.append(stage.eta)
            self._mean_diagonal += stage.eta * mean
        etas = self._priors.leave_free(self._stages, self._etas, damping * self._mean_diagonal or 1.0, self.target)
        if together is not None:  # K is symmetric
            self._eta = k.new_tensor(etas).view(-1, 1, 1)
            self._sides = together.mul_(self._eta).sum(1), diagonals
        else:  # of large matrices none has to be multiplied, a pass of its own
            eta = k.new_tensor(etas).view(-1, 1)
            self._sides = torch.stack([K.sum(0) for K in grams]).mul_(eta), diagonals.mul_(eta)
        self._add_up(grams if together is None else together, etas)

    def _add_up(self, grams: list[Tensor] | Tensor, etas: list[float]) -> None:
        """S and m of the first stage, and without a plan of all stages: each with those behind it.

        From eta K of a small batch, from K of a large one.
        """
        self._effects = effects = self._priors.effects(self.L)
        if effects is not None:
            self.m = effects.sum(0)
        if isinstance(grams, Tensor):
            if self.planned:
                self.S = grams.sum(0)
            else:
                self._sums = grams.cumsum(0)
                self.S = self._sums[-1]
            return
        for K, eta, system in zip(grams, etas, self._systems, strict=True):
            if self.S is None:
                self.S = K * eta
            else:
                self.S = self.S.add_(K, alpha=eta) if self.planned else torch.add(self.S, K, alpha=eta)
            system.S = None if self.planned else self.S
        ms = () if effects is None else effects.cumsum(0).unbind()
        for system, m in zip(self._systems, ms, strict=False):
            system.m = m

    def forget(self) -> None:
        """Drop the prior step: the model of this batch says that it leads uphill, or the batch has no loss."""
        self.m = self._effects = None
        self._priors.forget(self._stages)
        for system in self._systems:
            system.m = None

    @property
    def slope(self) -> float | None:
        """The change of this batch's loss, to first order, if the last update were made again; None if not known."""
        self._assemble()
        return self._slope

    def evidence(self) -> Evidence:
        """What a step that asks for all of the loss would do, to this batch and to samples left out of it."""
        self._assemble()
        if self._y is None:
            self._solve()
        r, inverse = self.target, self._inverse
        assert inverse is not None
        if inverse.dim() > 2:
            targets = r.expand(len(self._systems), -1)
            if self._effects is not None:
                targets = self._less(r, self._effects.cumsum(0))
            self._ys = torch.bmm(inverse, targets.unsqueeze(2)).squeeze(2)
            y, inverse = self._ys[-1], inverse[-1]
        else:
            y = torch.mv(inverse, self._less(r, self.m))
        diagonal, self._y = inverse.diagonal(), y
        achieved = torch.sub(r, y, alpha=self._damping)  # J phi
        # what the others alone would do to each sample; without others exactly zero, not a rounding error
        without = torch.addcdiv(r, y, diagonal, value=-1) if r.shape[0] > 1 else torch.zeros_like(r)
        rows = torch.stack([r, achieved, without])
        (square, own, unseen), (_, own2, _), (_, _, unseen2) = (rows @ rows.T).tolist()
        loss = 0.5 * square
        if loss <= 0:
            return Evidence(0.0, 0.0, 0.0, 0.0, 0.0)
        less = self._cost.of_step(self.root * y) if self._cost.value > 0 else None
        if less is not None:
            own, unseen, loss = own + less, unseen + less, loss + self._cost.value
            bend = less * less / (2 * self._cost.value)  # as if the cost were half a square, too
            own2, unseen2 = own2 + bend, unseen2 + bend
        return Evidence(loss, own / loss, own2 / loss, unseen / loss, unseen2 / loss)

    def _less(self, r: Tensor, m: Tensor | None) -> Tensor:
        """r - J m, from what the prior does to the losses."""
        return r if m is None else torch.addcmul(r, self.root, m, value=-1)

    def _solve(self) -> None:
        """Factorise what does not depend on the fraction: all stages of a small batch, or the first stage."""
        assert self.S is not None
        self._damping = DAMPING * self._mean_diagonal or 1.0  # a batch without any gradient is left alone
        self._roots = torch.outer(self.root, self.root)
        if self._sums is not None:
            self._inverse = self._factor(self._sums * self._roots).inverse()
            return
        self._first = self._factor(self.S * self._roots)
        self._inverse = self._first.inverse()  # its diagonal is needed; the damping keeps it exact

    def ask(self, fraction: float) -> None:
        """Ask for this fraction of each sample's loss, and of the prior step, in the forward sweep."""
        assert self._y is not None
        assert self._sides is not None
        w = self.root * self._y
        shares.promise(self._stages, *self._sides, w, self._effects, fraction)
        self._sides = None
        self._take(fraction)
        self._plan = w * fraction
        if self.planned:
            self._first = self._inverse = self._roots = None  # nothing is left to solve
            return
        self._reactions = Reactions(self._plan)
        assert self._roots is not None
        self.target = self.target * fraction
        if self._ys is not None:
            assert self._inverse is not None
            open_loop = self._ys * (self.root * fraction)
            gains = self._inverse * self._roots
            for system, w, gain in zip(self._systems, open_loop.unbind(), gains.unbind(), strict=True):
                system.open_loop, system.gain, system.m = w, gain, None
            return
        for t, system in enumerate(self._systems):
            if system.m is not None:
                system.m = system.m * fraction
            system.target = self.target
            if t == len(self._systems) - 1:
                system.cholesky, system.S = self._first, None
            elif system.S is not None:
                system.cholesky, system.S = self._factor(system.S * self._roots), None

    def _weights(self, system: System, c: Tensor | None) -> Tensor:
        if self.planned:
            assert self._plan is not None
            return self._plan
        w = super()._weights(system, c)
        return w if c is None or self._reactions is None else self._reactions.take(w)

    def reaction(self) -> float:
        """How far the stages have reacted to their new inputs: the weights of the samples, relative to the plan."""
        return 0.0 if self._reactions is None else self._reactions.relative()

    def _take(self, fraction: float) -> None:
        """Let all stages take this fraction of the prior."""
        self._fraction = fraction
        for stage, eta in zip(self._stages, self._etas, strict=True):
            stage.fraction = fraction
            stage.state["penalty_rate"] = eta / self._damping  # for the next step

    def _factor(self, A: Tensor) -> Cholesky:
        """The Cholesky factor of A + d I, with more damping where rounding asks for it."""
        d = self._damping
        A.diagonal(dim1=-2, dim2=-1).add_(d)
        factor, failed = cholesky(A)
        while any(failed.view(-1).tolist()) and d > 0 and bool(A.isfinite().all()):
            A.diagonal(dim1=-2, dim2=-1).add_(9 * d)
            d *= 10
            factor, failed = cholesky(A)
        return factor

    def predicted(self) -> float | None:
        assert self._y is not None
        assert self.S is not None
        c = -(self.S @ (self.root * self._y))
        c = self._fraction * (c if self.m is None else c - self.m)
        return float(c.sum() + 0.5 * (self.L * c) @ c)
