"""The steps that a step without scales starts from: what the last update has left undone, the way down the stage cost.

Their effect on the loss of each sample is the m of the stages. That of the last update, made again, is also the slope
of this batch's loss along it, of each layer and of all.
"""

from __future__ import annotations

from torch import Tensor

from ddpnopt._distributed import Peers
from ddpnopt.ddp.stage import Stage
from ddpnopt.ddp.value.stage_cost import CostChange, penalty_step
from ddpnopt.linear.layer import Parts, in_precision, stacked


class Priors:
    """Those of all stages, last to first."""

    def __init__(self, memory: float, cost: CostChange, penalty: float, peers: Peers, *, feels_slopes: bool) -> None:
        self.memory = memory  # times the last update is a part of the prior
        self._cost, self._penalty, self._peers, self._feels_slopes = cost, penalty, peers, feels_slopes
        self._free: list[float] = []  # part of eta that the stage cost leaves to the samples
        self._held: list[Parts | None] = []  # l_u where that part is not known yet
        self._effects: list[list[tuple[float, Tensor]]] = []  # factors and effects of the prior on each sample's loss
        self._repeated: list[Tensor | None] = []  # those of the last update, of our own samples
        self._together: Tensor | None = None  # the same in one tensor, where it is known at all stages
        self._knows_last = False  # whether the effect of the last update is known at the current stage

    def steps_of(self, stage: Stage) -> tuple[list[tuple[float, Parts]], list[Parts]]:
        """Give the stage its prior step; the steps whose effect is wanted, the last update first, and M^-1 l_u."""
        assert stage.balance is not None
        last, l_u, rate = stage.state.pop("update", None), stage.l_u, stage.state.get("penalty_rate", 0.0)
        penalty, free = penalty_step(stage, l_u, rate) if l_u is not None and rate else (None, 1.0)
        self._free.append(free)
        self._held.append(None if rate else l_u)
        if last is not None and (len(last) != len(stage.u) or last[0].dtype != stage.u[0].dtype):
            last = None  # a bias was frozen, or the precision changed
        self._knows_last = last is not None and self._feels_slopes
        steps: list[tuple[float, Parts]] = [(self.memory, last)] if last is not None and self._knows_last else []
        if penalty is not None:
            steps.append((1.0, penalty))
        cost = [stage.balance.scale(l_u, 2)] if l_u is not None and self._cost.value > 0 else []
        stage.prior, stage.decay, stage.l_u = [(share, step) for share, step in steps if share], penalty, None
        if self._peers.alone:
            stage.recall(steps[0][1] if self._knows_last else None)
        return steps, cost

    def last_of(self, stages: list[Stage]) -> list[Parts] | None:
        """Give all stages, which have no stage cost, their last update as prior step; None without any."""
        found: list[Parts] = []
        for stage in stages:
            last = stage.state.pop("update", None)
            stage.state.pop("combined_update", None)
            if last is not None:
                found.append(last)
                stage.prior = [(self.memory, last)] if self.memory else []
        self._free, self._held = [1.0] * len(stages), [None] * len(stages)
        return found or None

    def repeat(self, effects: Tensor | None) -> None:
        """What the last updates of all stages do to the samples, (T, N)."""
        self._together = effects

    def effects_of(
        self, stage: Stage, l_u: Parts | None, steps: list[tuple[float, Parts]], found: list[Tensor]
    ) -> list[tuple[float, Tensor]]:
        """Those of the prior, from the effects of all steps and, last, of M^-1 l_u."""
        if l_u is not None and len(found) > len(steps):
            along = found.pop()
            self._cost.add(stage, l_u, along if self._peers.alone else self._peers.gather(along, 1))
        self._repeated.append(found[0] if self._knows_last else None)
        return [(share, effect) for (share, _), effect in zip(steps, found, strict=True) if share]

    def add(self, effects: list[tuple[float, Tensor]]) -> None:
        """Those of the next stage, on all samples of the batch."""
        self._effects.append(effects)

    def slopes(self, like: Tensor) -> list[float] | None:
        """The slope of each layer along its last update; None where none is known."""
        if self._together is not None:
            return [-effect for effect in self._together.sum(1).tolist()]
        known = [effect for effect in self._repeated if effect is not None]
        each = stacked(known) if known else None
        effects = iter(each.sum(1).tolist() if each is not None else ())
        slopes = [0.0 if effect is None else -next(effects) for effect in self._repeated]
        self._together = each if len(known) == len(slopes) else None
        if not self._peers.alone:
            slopes = self._peers.sum([like.new_tensor(slopes)])[0].tolist()
        return slopes if known or any(slopes) else None

    def leave_free(self, stages: list[Stage], etas: list[float], damping: float, target: Tensor) -> list[float]:
        """The shares that the stage costs leave to the samples; a penalty small beside their loss leaves more."""
        loss = 0.5 * float(target @ target) if self._penalty > 0 else 0.0
        power = min(1.0, self._penalty / loss) if loss > 0 else 1.0
        for stage, eta, free, l_u in zip(stages, etas, self._free, self._held, strict=True):
            if l_u is not None:
                free = penalty_step(stage, l_u, eta / damping)[1]
            stage.eta = eta * free**power
        return [stage.eta for stage in stages]

    def effects(self, like: Tensor) -> Tensor | None:
        """What the prior of each stage does to each sample's loss, (T, N); None without any."""
        if self._together is not None and not self._effects:
            return self._together * self.memory if self.memory else None
        shares = {share for effects in self._effects for share, _ in effects}
        if len(shares) == 1 and all(len(effects) == 1 for effects in self._effects):  # in a few calls
            known, each = self._together, [effects[0][1] for effects in self._effects]
            if known is None or any(a is not b for a, b in zip(each, self._repeated, strict=True)):
                known = stacked(each)
            return in_precision(known, like.dtype) * shares.pop()
        if not shares:
            return None
        found = like.new_zeros(len(self._effects), len(like))
        for own, effects in zip(found, self._effects, strict=True):
            for share, effect in effects:
                own.add_(in_precision(effect, like.dtype), alpha=share)
        return found

    def forget(self, stages: list[Stage]) -> None:
        """Drop them: the model of this batch says that they lead uphill, or the batch has no loss."""
        self._cost.of_prior = 0.0
        for stage in stages:
            stage.prior, stage.decay = [], None
