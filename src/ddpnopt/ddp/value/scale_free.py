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

import torch
from torch import Tensor

from ddpnopt._distributed import ALONE, Peers
from ddpnopt.ddp.balance import balanced
from ddpnopt.ddp.balanced import Scaled
from ddpnopt.ddp.loss import sqrt_curvature
from ddpnopt.ddp.stage import Displacement, Stage
from ddpnopt.ddp.step_length import Evidence
from ddpnopt.ddp.value import shares
from ddpnopt.ddp.value.batch import TOGETHER, Batch, Solver, System
from ddpnopt.ddp.value.coupling import Coupling
from ddpnopt.ddp.value.sizes import numbers, set_sizes
from ddpnopt.ddp.value.stage_cost import CostChange, penalty_step
from ddpnopt.linear.layer import Parts, in_precision, per_sample_dot, stacked
from ddpnopt.linear.metric import IDENTITY, Metric
from ddpnopt.linear.sample_gradients import Sums

DAMPING = 1.0  # relative to the mean diagonal of A
LEAST_LOSS = 0.01  # of a sample, relative to the mean: one with a gradient and no loss does not block the others


class ScaleFree(Batch):
    """Joint value function of the batch in balanced variables; `ask` sets the fraction after the backward pass."""

    feels_slopes = True  # along the last update of each layer

    def __init__(
        self, losses: Tensor, displacement: Displacement, peers: Peers = ALONE, memory: float = 0.0, cost: float = 0.0,
        penalty: float = 0.0, total: float | None = None, least: float = LEAST_LOSS,
    ) -> None:  # fmt: skip
        """From the losses of the samples here; `total` is their sum, where it is known."""
        mean = peers.total(float(losses.sum()) if total is None else total) / peers.batch(losses.shape[0])
        losses = losses.clamp_min(least * mean)
        if peers.alone and losses.dtype.itemsize >= 4 and least * mean > torch.finfo(losses.dtype).tiny:
            r = losses.mul_(2).sqrt_()  # all are positive
            root = r.reciprocal()
            super().__init__(root.square(), r, displacement, residuals=(root, r))
        else:
            L = sqrt_curvature(losses)
            super().__init__(L, torch.ones_like(L), displacement, 1, peers)
        self.memory = memory  # times the last update is the prior step
        self._cost = CostChange(cost)  # of all stages
        self._penalty = penalty  # the part of it that is in the user's loss
        # of the stages, last to first
        self._stages: list[Stage] = []
        self._systems: list[System] = []
        self._grams: list[Tensor] = []  # K
        self._free: list[float] = []  # part of eta that the stage cost leaves to the samples
        self._held: list[Parts | None] = []  # l_u where that part is not known yet
        self._etas: list[float] = []  # before that
        self._effects: list[list[tuple[float, Tensor]]] = []  # factors and effects, on each sample's loss, of the prior
        self._repeated: list[Tensor | None] = []  # of the last update, of our own samples
        self._together: Tensor | None = None  # the same in one tensor, where it is known at all stages
        self._slope: float | None = None
        self._ms: Tensor | None = None  # m of all stages, (T, N), where all have the same kind of prior
        self._knows_last = False  # whether the effect of the last update is known at the current stage
        self._sums: Tensor | None = None  # S of all stages, (T, N, N), for a small batch
        self._mean_diagonal = 0.0  # of A at the first stage, without the curvature of the stage cost
        self._damping = 1.0
        self._fraction = 1.0
        self._y: Tensor | None = None  # the solution at the first stage, for fraction 1
        self._ys: Tensor | None = None  # those at all stages, (T, N), for a small batch
        self._first: Tensor | None = None  # the Cholesky factor there
        self._diagonal: Tensor | None = None  # of the inverse there
        self._inverse: Tensor | None = None  # of the matrices of all stages, (T, N, N), for a small batch

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
            steps, cost = self._set_prior(stage)
            stage.recall(steps[0][1] if self._knows_last else None)
            K, found = gradients.couple([step for _, step in steps] + cost)
            effects = self._effects_of(stage, l_u, steps, found)
        else:
            coupling, sketched = self._coupling or Coupling(stage), stage.sketched
            self._coupling = None
            steps, cost = self._set_prior(stage)
            p, layer = stage.p_h[0], stage.layer
            asked = [step for _, step in steps] + cost
            if sketched is not None:
                own, found = sketched, [sketched.effect(step) for step in asked]
            else:
                own = Scaled(stage.gradients(coupled=True), stage.balance)
                found = [per_sample_dot(p, layer.apply(stage.x, step)) for step in asked]
            effects = self._effects_of(stage, l_u, steps, found)
            mine = p.new_zeros(len(p))  # another process may have a prior where this one has none
            for share, effect in effects:
                mine = mine + share * effect
            K, gathered = coupling.gram(IDENTITY, mine)
            assert gathered is not None
            effects = [(1.0, gathered)]
        system = System(None, stage.state, None)
        self._stages.append(stage)
        self._systems.append(system)
        self._grams.append(in_precision(K, self.L.dtype))
        self._effects.append(effects)
        return own, partial(self._weights, system)

    def _set_prior(self, stage: Stage) -> tuple[list[tuple[float, Parts]], list[Parts]]:
        """Give the stage its prior step; the steps whose effect is wanted, the last update first, and M^-1 l_u."""
        assert stage.balance is not None
        last, l_u, rate = stage.state.pop("update", None), stage.l_u, stage.state.get("penalty_rate", 0.0)
        penalty, free = penalty_step(stage, l_u, rate) if l_u is not None and rate else (None, 1.0)
        self._free.append(free)
        self._held.append(None if rate else l_u)
        if last is not None and (len(last) != len(stage.u) or last[0].dtype != stage.u[0].dtype):
            last = None  # a bias was frozen, or the precision changed
        self._knows_last = last is not None and self.feels_slopes
        steps: list[tuple[float, Parts]] = [(self.memory, last)] if last is not None and self._knows_last else []
        if penalty is not None:
            steps.append((1.0, penalty))
        cost = [stage.balance.scale(l_u, 2)] if l_u is not None and self._cost.value > 0 else []
        stage.prior, stage.decay, stage.l_u = [(share, step) for share, step in steps if share], penalty, None
        return steps, cost

    def _effects_of(
        self, stage: Stage, l_u: Parts | None, steps: list[tuple[float, Parts]], found: list[Tensor]
    ) -> list[tuple[float, Tensor]]:
        """Those of the prior, from the effects of all steps and, last, of M^-1 l_u."""
        if l_u is not None and len(found) > len(steps):
            along = found.pop()
            self._cost.add(stage, l_u, along if self.peers.alone else self.peers.gather(along, 1))
        self._repeated.append(found[0] if self._knows_last else None)
        return [(share, effect) for (share, _), effect in zip(steps, found, strict=True) if share]

    def _assemble(self, damping: float = DAMPING) -> None:
        """The shares eta of the layers, and with them S and m of all stages."""
        grams, self._grams = self._grams, []
        if not grams:
            return
        N = self.L.shape[0]
        together = torch.stack(grams) if N <= TOGETHER else None
        if together is not None:
            k = torch.diagonal(together, dim1=1, dim2=2) @ self.L
        else:
            k = torch.stack([torch.vdot(self.L, K.diagonal()) for K in grams])
        self._feel_slopes()
        means = [total / N for total in k.tolist()]
        set_sizes(self._stages, means, self.target)
        for stage, mean in zip(self._stages, means, strict=True):
            stage.eta *= stage.size * (numbers(stage) / mean) ** 0.5 if mean > 0 else 0.0
            self._etas.append(stage.eta)
            self._mean_diagonal += stage.eta * mean
        etas = self._leave_free(damping * self._mean_diagonal or 1.0)
        if together is not None:
            self._sums = together.mul_(k.new_tensor(etas).view(-1, 1, 1)).cumsum(0)
            self.S = self._sums[-1]
        else:
            for K, eta, system in zip(grams, etas, self._systems, strict=True):
                K.mul_(eta)
                self.S = system.S = K if self.S is None else K.add_(self.S)
        self._add_up_effects()

    def _feel_slopes(self) -> None:
        """The slope along the last update: of each layer for its share, and the one of all."""
        known = [effect for effect in self._repeated if effect is not None]
        each = stacked(known) if known else None
        effects = iter(each.sum(1).tolist() if each is not None else ())
        slopes = [0.0 if effect is None else -next(effects) for effect in self._repeated]
        self._together = each if len(known) == len(slopes) else None
        if not self.peers.alone:
            slopes = self.peers.sum([self.L.new_tensor(slopes)])[0].tolist()
        if known or any(slopes):
            self._slope = sum(slopes)
            shares.correct(self._stages, slopes)

    def _leave_free(self, damping: float) -> list[float]:
        """The shares that the stage costs leave to the samples; a penalty small beside their loss leaves more."""
        loss = 0.5 * float(self.target @ self.target) if self._penalty > 0 else 0.0
        power = min(1.0, self._penalty / loss) if loss > 0 else 1.0
        for stage, eta, free, l_u in zip(self._stages, self._etas, self._free, self._held, strict=True):
            if l_u is not None:
                free = penalty_step(stage, l_u, eta / damping)[1]
            stage.eta = eta * free**power
        return [stage.eta for stage in self._stages]

    def _add_up_effects(self) -> None:
        """m of all stages: what the priors of a stage and those behind it do to each sample's loss."""
        shares = {share for effects in self._effects for share, _ in effects}
        if len(shares) == 1 and all(len(effects) == 1 for effects in self._effects):  # in a few calls
            known, each = self._together, [effects[0][1] for effects in self._effects]
            if known is None or any(a is not b for a, b in zip(each, self._repeated, strict=True)):
                known = stacked(each)
            self._ms = in_precision(known, self.L.dtype).cumsum(0).mul_(shares.pop())
            self.m = self._ms[-1]
            for system, m in zip(self._systems, self._ms.unbind(), strict=True) if self._sums is None else ():
                system.m = m
            return
        for system, effects in zip(self._systems, self._effects, strict=True):
            for share, effect in effects:
                own = effect.to(self.L.dtype) * share
                self.m = own if self.m is None else self.m + own
            system.m = self.m

    def forget(self) -> None:
        """Drop the prior step: the model of this batch says that it leads uphill, or the batch has no loss."""
        self.m = self._ms = None
        self._cost.of_prior = 0.0
        for stage, system in zip(self._stages, self._systems, strict=True):
            stage.prior, stage.decay, system.m = [], None, None

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
        r = self.target
        if self._inverse is not None:
            if self._ms is not None:
                targets = self._less(r, self._ms)
            else:
                targets = torch.stack([self._less(r, system.m) for system in self._systems])
            self._ys = torch.bmm(self._inverse, targets.unsqueeze(2)).squeeze(2)
            y, diagonal = self._ys[-1], self._inverse[-1].diagonal()
        else:
            assert self._first is not None
            assert self._diagonal is not None
            y, diagonal = torch.cholesky_solve(self._less(r, self.m)[:, None], self._first)[:, 0], self._diagonal
        self._y = y
        achieved = torch.sub(r, y, alpha=self._damping)  # J phi
        # what the others alone would do to each sample; without others exactly zero, not a rounding error
        without = torch.addcdiv(r, y, diagonal, value=-1) if r.shape[0] > 1 else torch.zeros_like(r)
        rows = torch.stack([r, achieved, without])
        (square, own, unseen), (_, own2, _), (_, _, unseen2) = (rows @ rows.T).tolist()
        loss = 0.5 * square
        if loss <= 0:
            return Evidence(0.0, 0.0, 0.0, 0.0, 0.0)
        less = self._cost.of_step(self.root * y)
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
            self._inverse = torch.cholesky_inverse(self._factor(self._sums * self._roots))
            return
        self._first = self._factor(self.S * self._roots)
        self._diagonal = torch.cholesky_inverse(self._first).diagonal()

    def ask(self, fraction: float) -> None:
        """Ask for this fraction of each sample's loss, and of the prior step, in the forward sweep."""
        self._promise(fraction)
        self._take(fraction)
        assert self._roots is not None
        self.target = self.target * fraction
        if self._inverse is not None:
            assert self._ys is not None
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

    def _promise(self, fraction: float) -> None:
        assert self._y is not None
        priors = self._ms
        if priors is None:
            none = torch.zeros_like(self.L)
            priors = torch.stack([none if system.m is None else system.m for system in self._systems])
        sums = self._sums if self._sums is not None else [system.S for system in self._systems if system.S is not None]
        shares.promise(self._stages, sums, self.root * self._y, priors, fraction)

    def _take(self, fraction: float) -> None:
        """Let all stages take this fraction of the prior."""
        self._fraction = fraction
        for stage, eta in zip(self._stages, self._etas, strict=True):
            stage.fraction = fraction
            stage.state["penalty_rate"] = eta / self._damping  # for the next step

    def _factor(self, A: Tensor) -> Tensor:
        """The Cholesky factor of A + d I, with more damping where rounding asks for it."""
        d = self._damping
        A.diagonal(dim1=-2, dim2=-1).add_(d)
        factor, failed = torch.linalg.cholesky_ex(A)
        while any(failed.view(-1).tolist()) and d > 0 and bool(A.isfinite().all()):
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
