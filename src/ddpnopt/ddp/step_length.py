"""How long a step is: what it does for samples that did not make it, and how curved the network is along it.

A step asks for the fraction alpha of each sample's loss, in the sense of the joint quadratic model. Three estimates
decide on alpha, all of them relative to the loss, so that no scale enters:

- *Unseen samples.* Leaving sample i out of the batch has a closed form (`ScaleFree.evidence`): it says by how much a
  step made from the other samples would lower its loss, to first order (`unseen`), and the second-order term of that
  (`unseen_curvature`). Their ratio is the fraction that serves samples outside the batch best.
- *Curvature.* kappa is the true second-order term of a step, from the loss of the same batch after the forward sweep,
  over that of the model: 1 where the model is right, 2,000 in a deep autoencoder. It divides all fractions, and
  it is remembered: a step that went too far shortens the next ones.
- *The slope after the step.* The gradient of the next batch along the last update is negative while longer steps would
  have gone further down, for any network and any loss, also where samples are coupled (batch norm, contrastive losses)
  and leaving one out means nothing: there it takes the place of the first estimate, within what the curvature allows.
  Where noise alone hides what samples left out say, it has to be clearly negative for a length to be kept.
  With batch norm it decides alone. There a deep network is rough at a small scale: gradients explode, and short steps
  measure a curvature that longer ones do not meet. Bounded by it, steps get shorter and shorter, and stay in the rough.

Fractions at most double from step to step, and while samples left out still gain from a step only the curvature makes
them fall: what is best for the next step alone gets shorter and shorter in the noise of a few steep directions, long
before the flat ones have arrived. The noise is left to the average of the weights.

No step changes a layer by more than a part of its size. Where gradients vanish, any fraction of the loss can ask for
any change of the weights, and in the first steps all samples agree on changes that later ones take back.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

START = 0.01  # of the loss: what the first step asks for; it doubles from there
DECAY = 0.9  # of the running estimates of the curvature
EVIDENCE = 0.95  # of those of samples left out, which are noisier
FELT_DECAY = 0.7  # of that of the slope: the length adds up what it says anyway
PATIENCE = 0.6  # of the fraction that is best for the next step alone: noise averages out over shorter steps
OWN = 0.7  # of the minimum along the step on the batch itself, at most
SINGLE = 0.1  # of that, in batches of one sample
MEMORY = 0.9  # of what the last step has left undone: it is the prior of the next one
HELD = 0.8  # … if the limit on the layers has held it: in the first steps less of what all samples agree on
GROWTH = 2.0  # of the fraction, and 1/kappa, from step to step
SHRINK = 0.25  # the least a fraction keeps from step to step, and of a step that is made again
SLOPE_GAIN = 1.0  # how strongly the slope after a step acts on the logarithm of the fraction
SLOPE_OFFSET = 0.05  # the slope, relative to the step's own, at which a length is kept: a little beyond the minimum
NORMED = 0.12  # … with batch norm, further beyond it: the average of the weights takes the noise out
NOISE = 2.0  # standard errors below zero from which on the evidence of samples left out is that of coupled ones
LEAST_KAPPA = 0.5
REACH = 0.08  # of a layer's spectral norm: what a step may change
RISE = 1.25  # of the fraction that changes a layer by REACH, with batch norm: there it differs much between batches
SURPRISE = 10.0  # deviations of a loss above its running mean at which the last step is taken back
FELT = 0.5  # of the curvature by the slope after a step: a lower bound of kappa
RESOLUTION = 1e-6  # relative changes of the loss below this are rounding errors
TESTED = 1e-5  # least decrease, relative to the loss, of a step at which the order of its error can be told
DOUBTED = 4.0  # times kappa at the start, or at the last test: from there on it is tested whether it is a curvature
PROBE = 4.0  # times a step that the curvature has bounded: now and then a step so long is tried
AGAIN = 50  # steps after which it is tested again if it was none


@dataclass(frozen=True)
class Evidence:
    """What the joint model says of a step that asks for all of the loss; everything is relative to the loss."""

    loss: float  # of the batch, above its minimum
    own: float  # first-order decrease of the batch's own loss
    own_curvature: float  # twice the second-order term of it
    unseen: float  # first-order decrease of the loss of samples left out
    unseen_curvature: float


@dataclass
class StepLength:
    """The fraction of the next step, and the running estimates behind it."""

    steps: int = 0
    fraction: float = 0.0  # that the last step asked for, before a scheduler's factor
    taken: float = 0.0  # with it
    kappa: float = 1.0
    loss: float = 0.0  # running mean: batches with a larger loss count for more
    weight: float = 0.0  # of the running sums below
    own: float = 0.0
    own_curvature: float = 0.0
    unseen: float = 0.0
    unseen_curvature: float = 0.0
    unseen_square: float = 0.0  # of `unseen` in single batches: how far its mean may be from the truth
    true_curvature: float = 0.0
    model_curvature: float = 0.0
    felt_curvature: float = 0.0  # by the slope after a step
    felt_model: float = 0.0
    decrease: float = 0.0  # first-order decrease of the last step
    slope: float = 0.0  # running slope after a step, relative to `decrease`
    slope_weight: float = 0.0
    expected: float = 0.0  # running mean of the losses that were seen
    deviation: float = 0.0  # … and of their distance from it
    seen: int = 0
    coupled: bool = False  # whether the network of the last step is known to couple the samples
    beyond: bool = False  # whether a step has ever gone too far: the slope says so with batch norm, or it was refused
    below_zero: bool = False  # whether the loss of any batch was
    flatness: float = 0.0  # of a loss that was: squares of its gradients over its level, in the first such batch
    softened: float = 1.0  # times it is what the slopes say of its curvature
    memory: float = 0.0  # times the last update is the prior of the next step
    promised: float = 0.0  # the first-order decrease that `true_curvature` is what is missing of, twice
    amiss: float = 0.0  # the part of it that does not come however short a step is
    doubted: float = math.inf  # kappa from which on that is tested
    tested: int = 0  # the last step at which it was
    longer: float = 0.0  # the fraction of a step that is made again, shorter, for such a test; zero: none
    missed: float = 0.0  # of its first-order decrease
    held: bool = False  # whether the limit on the change of a layer has bounded the last fraction
    bounded: bool = False  # whether the curvature alone has bounded the last fraction
    wait: float = 0.0  # until that many steps have been made before a longer one is tried again
    shorter: float = 0.0  # the fraction of a step that is made again, longer; zero: none
    gained: float = 0.0  # the change of the loss by it
    reach: float = math.inf  # the fraction with which the last step would have changed a layer by REACH

    def level(self, loss: float | None) -> float | None:
        """The loss of a batch as a level above its minimum: none, zero, once it has been below zero.

        A loss that changes its sign from batch to batch (advantages in a policy gradient) has no level in any of them.
        """
        self.below_zero = self.below_zero or (loss is not None and loss < 0)
        return 0.0 if self.below_zero else loss

    def is_surprised(self, loss: float | None) -> bool:
        """Whether the loss of a batch is so far above those before that the last step must have gone wrong."""
        if loss is None:
            return False
        away, most = loss - self.expected, SURPRISE * self.deviation + abs(self.expected)
        surprised = self.seen * (1 - DECAY) >= 1 and not away <= most
        away = most if surprised else away  # where losses stay as large, that is expected soon
        rate = max(1 - DECAY, 1 / (self.seen + 1))
        self.deviation += rate * (abs(away) * (self.seen > 0) - self.deviation)
        self.expected += rate * away
        self.seen += 1
        return surprised

    def retreat(self) -> None:
        """The last step has been taken back: start again from a quarter of it, and remember nothing of it."""
        self.fraction *= SHRINK
        self.kappa /= SHRINK
        self.memory = 0.0

    def refuse(self, asked: float) -> None:
        """A step of this fraction has gone completely wrong: if no shorter one succeeds, the next starts from here."""
        self.fraction, self.memory, self.beyond, self.wait = asked, 0.0, True, GROWTH * self.steps

    def choose(self, found: Evidence, *, coupled: bool = False) -> float:
        """The fraction to ask for; a batch without loss or gradient leaves everything as it is.

        `coupled` says that the network is known to couple the samples (batch norm).
        """
        self.coupled, self.shorter = coupled, 0.0  # a step that was given up may have been on trial
        if found.loss <= 0 or found.own < RESOLUTION:
            return self.fraction
        self.loss = found.loss if self.steps == 0 else DECAY * self.loss + (1 - DECAY) * found.loss
        share = found.loss / self.loss if self.loss > 0 else 1.0
        unseen, rate = found.unseen * share, 1 - EVIDENCE
        self.weight = EVIDENCE * self.weight + rate
        self.own = EVIDENCE * self.own + rate * found.own * share
        self.own_curvature = EVIDENCE * self.own_curvature + rate * found.own_curvature * share
        self.unseen = EVIDENCE * self.unseen + rate * unseen
        self.unseen_curvature = EVIDENCE * self.unseen_curvature + rate * found.unseen_curvature * share
        self.unseen_square = EVIDENCE * self.unseen_square + rate * unseen**2
        if self.steps == 0 or not 0 < self.fraction < math.inf:
            self.fraction = START / found.own
            self.kappa = 0.5 * found.own / max(found.own_curvature * self.fraction, RESOLUTION)
            self.doubted = DOUBTED * self.kappa
            self.bounded = coupled
        else:
            self.fraction = self._next()
        self.steps += 1
        return self.fraction

    def _next(self) -> float:
        last, gains = self.fraction, self.unseen > RESOLUTION * self.own
        on_batch = OWN * self.own / max(self.kappa * self.own_curvature, 1e-300)
        wanted = last
        if self.slope_weight > 0 and (self.coupled or not gains):  # leaving samples out says nothing
            kept_at = NORMED if self.coupled else -SLOPE_OFFSET if self._is_noise() else SLOPE_OFFSET
            slope = self.slope / self.slope_weight
            wanted = last * math.exp(SLOPE_GAIN * (kept_at - slope))
            if self.coupled:  # the curvature at this length says nothing about longer steps
                self.beyond, on_batch = self.beyond or slope > kept_at, math.inf
                wanted = wanted if self.beyond else GROWTH * last
        elif gains:
            wanted = max(last, PATIENCE * self.unseen / max(self.kappa * self.unseen_curvature, 1e-300))
        if self.unseen_curvature <= 0:  # batches of one sample: nothing is known of the others
            on_batch *= SINGLE
        fraction = max(min(on_batch, GROWTH * last, wanted), SHRINK * last)
        self.held = fraction > (1 + RESOLUTION) * self.reach
        bound = GROWTH * last if self.coupled and not self.beyond else on_batch
        self.bounded = GROWTH * bound <= min(self._within_model(), self.reach)
        return min(fraction, self.reach)

    def _is_noise(self) -> bool:
        """Whether samples left out say nothing because of noise, and not because they are coupled to the others."""
        if self.weight <= 0:
            return False
        mean = self.unseen / self.weight
        variance = max(self.unseen_square / self.weight - mean**2, 0.0)
        return mean > -NOISE * math.sqrt(variance * (1 - EVIDENCE) / (1 + EVIDENCE))

    def is_within_reach(self, share: float, taken: float) -> bool:
        """Take in by which share of its size a step of fraction `taken` changes a layer, and judge it."""
        reach = taken * REACH / share if share > 0 else math.inf
        self.reach = min(reach, RISE * self.reach) if self.coupled else reach
        return share <= GROWTH * REACH

    def feel(self, slope: float) -> None:
        """Take in the slope of the next batch's loss along the last update, relative to its loss.

        It is judged by the decrease that the step has promised, which is no more than the whole loss: where a network
        is rough, far longer steps than the gradient is good for promise many times that.
        """
        relative = max(-1.0, min(1.0, slope / max(min(self.decrease, 1.0), RESOLUTION)))
        self.slope = FELT_DECAY * self.slope + (1 - FELT_DECAY) * relative
        self.slope_weight = FELT_DECAY * self.slope_weight + 1 - FELT_DECAY

    def longer_to_try(self, taken: float, change: float | None) -> float:
        """By what to make a step longer, once, to see whether the curvature is one at a small scale only; 1: not now.

        Where a layer norm follows weights near zero, a network is rough at the scale of these weights and smooth beyond
        it. Steps bounded by the curvature of the rough stay there. How many steps pass between two attempts in vain
        grows with their number, so that they cost next to nothing.
        """
        if change is None or not self.bounded or self.amiss > 0 or self.steps <= self.wait:
            return 1.0
        longer = min(PROBE * taken, self._within_model(), self.reach / RISE) / taken  # clearly within the limit
        if longer < GROWTH:
            return 1.0
        self.shorter, self.gained = taken, change
        return longer

    def is_better(self, change: float | None) -> bool:
        """Whether the longer step has lowered the loss by more than the shorter one."""
        better = change is not None and change < self.gained
        if better:  # the curvature that bounded it is none at this length
            self.true_curvature = self.model_curvature = self.promised = 0.0
            self.slope = self.slope_weight = 0.0
            self.kappa = LEAST_KAPPA
        self.wait = (RISE if better else GROWTH) * self.steps
        return better

    def _within_model(self) -> float:
        """The fraction at which the model has its minimum; it says nothing where samples are coupled."""
        return math.inf if self.coupled else self.own / max(self.own_curvature, 1e-300)

    def is_to_be_tested(self, found: Evidence, taken: float, change: float | None) -> bool:
        """Whether to make a step again, shorter: what a curvature takes from it falls with the square of its length.

        Where the gradient is not that of the loss (straight-through estimators, targets without a gradient), a part of
        the decrease never comes, in short steps as in long ones. Taken for a curvature, it would grow as steps get
        shorter, until the training stands still.
        """
        decrease = taken * found.own
        due = self.kappa > self.doubted or (self.amiss > 0 and self.steps >= self.tested + AGAIN)
        if change is None or SHRINK * decrease < TESTED or not due:
            return False
        self.longer, self.missed = taken, (change + decrease) / decrease
        return True

    def _test(self, found: Evidence, taken: float, change: float) -> None:
        """Extend what is missing after the longer and the shorter step to one of no length."""
        ratio, missed = taken / self.longer, change / (taken * found.own) + 1
        self.amiss = max(0.0, (missed - ratio * self.missed) / (1 - ratio))
        self.kappa = max(self._curvature(), LEAST_KAPPA)
        self.doubted, self.tested = max(self.doubted, DOUBTED * self.kappa), self.steps

    def error(self, found: Evidence, taken: float, change: float | None) -> float:
        """How far the loss is above what kappa, and the part that never comes, say; relative to the decrease."""
        decrease = taken * found.own
        if change is None or decrease < RESOLUTION:
            return 0.0
        return (change + decrease - 0.5 * self.kappa * found.own_curvature * taken**2) / decrease - self.amiss

    def learn(
        self,
        found: Evidence,
        asked: float,
        taken: float,
        change: float | None,
        *,
        planned: bool = False,
        steps: int = 1,
    ) -> None:
        """Take in a step of fraction `taken`, `asked` times a scheduler's factor, and the true change of the loss.

        A `planned` step has no change to learn from: kappa becomes what the roll-outs have found, which the slopes may
        have raised since. The next roll-out, so many `steps` after the last one, counts for all of them.
        """
        if taken <= 0 or found.own < RESOLUTION:
            return
        self.fraction, self.taken = asked, taken  # the factor is not remembered: each step has it once
        decrease = self.decrease = taken * found.own
        if planned:
            self._settle()
        elif change is None or decrease < RESOLUTION:
            self.kappa = max(self.kappa / GROWTH, LEAST_KAPPA)  # bounded by the slope after the step alone
        else:
            if self.longer > taken:
                self._test(found, taken, change)
            self._measure(2 * max(change + decrease - RESOLUTION, 0.0), decrease, found, taken, DECAY**steps)
        self.longer = 0.0
        left = 1 - taken * self.kappa * found.own_curvature / found.own  # of the slope along the step, after it
        self.memory = (HELD if self.held else MEMORY) * min(max(left, 0.0), 1.0) / taken

    def learn_from_slope(self, found: Evidence, slope: float) -> None:
        """Where the loss after a step is a guess, or not known: the slope of the next batch along the update.

        It needs neither the form nor the scale of the loss. The batch is another one: before the step, the slope there
        was that of unseen samples. Half of the difference is a lower bound of kappa. Noise of either sign is part of
        the running mean: counted where it is positive alone, it would be as large in short steps as in long ones, and
        look like a curvature that grows with every shorter step.
        """
        if self.unseen_curvature <= 0:  # a single sample says nothing of the slope at the next one: that is noise
            return
        model = found.own_curvature * self.taken**2
        before = self.decrease * min(1.0, max(self.unseen, 0.0) / max(self.own, 1e-300))
        self.felt_curvature = DECAY * self.felt_curvature + (1 - DECAY) * (slope + before)
        self.felt_model = DECAY * self.felt_model + (1 - DECAY) * model
        ratio = self.felt_curvature / max(self.felt_model, 1e-300)
        self.kappa = max(self.kappa, FELT * ratio)
        if self.below_zero and self.felt_model > 0:  # the curvature of the first batch was a guess by its outputs
            self.softened *= math.exp((1 - DECAY) * (min(max(ratio, 0.0), 2.0) - 1))
            self.softened = min(1.0, self.softened)

    def _measure(self, true: float, decrease: float, found: Evidence, taken: float, decay: float) -> None:
        """Take in twice what is missing of the first-order decrease."""
        share = found.loss / self.loss if self.loss > 0 else 1.0
        model = found.own_curvature * taken**2
        self.true_curvature = decay * self.true_curvature + (1 - decay) * true * share
        self.model_curvature = decay * self.model_curvature + (1 - decay) * model * share
        self.promised = decay * self.promised + (1 - decay) * decrease * share
        self.amiss = max(0.0, min(self.amiss, 0.5 * self.true_curvature / self.promised))  # it may be less by now
        self._settle()

    def _settle(self) -> None:
        """Let kappa be what the running means say, or half of what it was."""
        self.kappa = max(self._curvature(), LEAST_KAPPA, self.kappa / GROWTH)

    def _curvature(self) -> float:
        return (self.true_curvature - 2 * self.amiss * self.promised) / max(self.model_curvature, 1e-300)

    def state(self) -> dict[str, float]:
        """For a checkpoint: plain numbers."""
        return asdict(self)
