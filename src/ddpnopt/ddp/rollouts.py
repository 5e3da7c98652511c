"""When the forward sweep runs: a roll-out shows what the plan cannot know, and that changes slowly.

If the network were linear along a step, no layer would have anything to react to: with the c_t that the model predicts,
every stage has the solution y of the first one,

    (A_t + d I) y_t = alpha r + c_t,    c_t = -(A_1 - A_t) y        =>    y_t = y

so that all updates are known without a second forward pass: the *plan*. A roll-out of the new weights shows how far the
layers' reactions to the true states lead away from it, and the true loss after the step, from which kappa comes
(`ddp.step_length`). While both confirm what was known before, the next steps follow the plan, twice as many each time;
after a roll-out that does not confirm it a quarter as many, and none if its step has not lowered the loss. A loss that
is lower than predicted confirms the plan, too. What a roll-out says holds for steps of its length: after a longer one
the next is rolled out.

Training loops have periods: losses in turn, batches in a fixed order. Roll-outs every eighth step would see one of two
losses only, and know nothing of the other. So some intervals are one step shorter, in the order of a Fibonacci word,
which has no period: the roll-outs come to every place of every period, to all of them equally often.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LONGEST = 16  # steps from one roll-out to the next, at most
BACK = 4  # by which a roll-out that does not confirm the plan divides that
SHORTER = (3 - math.sqrt(5)) / 2  # the share of intervals that are one step shorter: irrational, so without a period
REACTED = 0.3  # difference of the samples' weights from the plan, relative to it, up to which it is confirmed
TRUSTED = 0.15  # error of the predicted decrease, relative to it, up to which it is
SETTLED = 1.25  # factor by which kappa may change, and by which a step may be longer than the last one rolled out


@dataclass
class Rollouts:
    """Counts the steps that have followed the plan since the last roll-out."""

    longest: int  # interval; 1: each step is rolled out
    interval: int = 1  # steps from the last roll-out to the next one
    planned: int = 0  # steps since the last one
    length: float = math.inf  # of the last one: the fraction that it asked for
    kappa: float = 0.0  # after it; between two of them the slopes may raise it
    count: int = 0  # roll-outs so far

    @property
    def is_due(self) -> bool:
        """Whether the next step is to be rolled out."""
        shorter = math.floor((self.count + 1) * SHORTER) - math.floor(self.count * SHORTER)  # 0 or 1
        return self.planned + 1 >= self.interval - shorter * (self.interval > 2)

    def follow(self, length: float) -> None:
        """A step that asked for this fraction has followed the plan."""
        self.planned += 1
        if length > SETTLED * self.length:
            self.interval = min(self.interval, self.planned + 1)

    def observe(self, length: float, reaction: float, error: float, kappa: float) -> None:
        """Take in a roll-out of a step that asked for the fraction `length`.

        `reaction` is how far the layers have reacted, relative to the plan, `error` how far the loss was above its
        prediction, relative to the decrease that the step promised; `kappa` is the curvature that is known now.
        """
        settled = self.kappa / SETTLED <= kappa <= self.kappa * SETTLED
        if reaction <= REACTED and error <= TRUSTED and settled:
            self.interval = min(2 * self.interval, self.longest)
        else:  # once all of the decrease is missing, nothing is known of the next steps
            self.interval = max(1, self.interval // BACK) if error < 1 else 1
        self.length, self.kappa, self.planned, self.count = length, kappa, 0, self.count + 1

    def doubt(self) -> None:
        """Something has gone wrong: roll out the next steps."""
        self.interval, self.planned = 1, 0

    def state(self) -> dict[str, float]:
        """For a checkpoint: plain numbers."""
        return {name: getattr(self, name) for name in ("interval", "planned", "length", "kappa", "count")}

    def load(self, state: dict[str, float]) -> None:
        """Continue from a checkpoint, within what the options allow."""
        self.interval, self.planned = min(int(state.get("interval", 1)), self.longest), int(state.get("planned", 0))
        self.length, self.count = state.get("length", math.inf), int(state.get("count", 0))
        self.kappa = state.get("kappa", 0.0)
