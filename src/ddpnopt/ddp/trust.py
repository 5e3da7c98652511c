"""How far the linear model of the residuals is trusted: the damping of steps with derivatives in the loss.

The loss after such a step is known when the next one begins. Where the points have stayed the same, it is compared with
what the model has predicted, as in the method of Levenberg and Marquardt: with rho the logarithm of the actual over
that of the predicted decrease, the damping is multiplied by

    1 - (2 rho - 1)^3        between 1/3 and 3   (Nielsen)

Where points are drawn anew in each step, losses of different batches are compared. Their logarithms telescope, so that
the noise cancels in a running mean of the decrease, a, and the damping falls as long as the loss does:

    exp(-4 (a - 0.01))       between 1/1.7 and 1.1

A step after which the loss is larger is taken back at the beginning of the next one, all but a quarter of it.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

START = 1.0  # damping of the first step, relative to the mean diagonal of A
LEAST, LARGEST = 1e-10, 1e6
FALL, RISE = 3.0, 3.0  # of the damping from step to step, at most
FALL_ANEW, RISE_ANEW = 1.7, 1.1  # … where points are drawn anew: noise alone must not stop the training
GAIN = 4.0  # effect of the decrease there
PLATEAU = 0.01  # decrease at which the damping is kept
DECAY = 0.8  # of the running means
KEPT = 0.25  # of a step that is taken back
TOLERATED = 0.01  # increase of the loss, relative, on the same points
TOLERATED_ANEW = 3.0  # … on others
RETRIES = 8  # how often in a row a step is taken back
RESOLUTION = 1e-6  # relative changes of the loss below this are rounding errors


@dataclass
class Trust:
    """The damping of the next step, and what the last one has promised."""

    damping: float = START
    step: int = -1  # the optimizer's count at the last step with derivatives
    loss: float = 0.0  # before that step
    promised: float = 0.0  # predicted after it
    level: float = 0.0  # running geometric mean of the loss
    decrease: float = 0.0  # running mean of the logarithm, where points change
    points: list[float] = field(default_factory=list)  # a number for each set of samples, which tells it from others
    retries: int = 0

    def takes_back(self, loss: float, points: list[float], step: int) -> bool:
        """Judge the last step by the loss after it; True if most of it is to be taken back."""
        if self.step != step - 1 or self.loss <= 0:
            return False
        same = points == self.points
        limit = (1 + TOLERATED) * self.loss if same else (1 + TOLERATED_ANEW) * max(self.loss, self.level)
        if not loss <= limit and self.retries < RETRIES:
            self.damping = min(self.damping / (KEPT if same else math.sqrt(KEPT)), LARGEST)
            self.retries += 1
            self.step = step
            self.promised = self.loss - KEPT * (2 - KEPT) * (self.loss - self.promised)  # of the part that is kept
            return True
        self.retries = 0
        if 0 < loss < math.inf:
            self._learn(math.log(self.loss / loss), same)
        return False

    def _learn(self, actual: float, same: bool) -> None:
        if same:
            predicted = math.log(self.loss / max(self.promised, 1e-30 * self.loss))
            if predicted < RESOLUTION:
                return
            rho = min(max(actual / predicted, -1.0), 1.0)
            factor = min(max(1 - (2 * rho - 1) ** 3, 1 / FALL), RISE)
        else:
            self.decrease = DECAY * self.decrease + (1 - DECAY) * actual
            factor = min(max(math.exp(-GAIN * (self.decrease - PLATEAU)), 1 / FALL_ANEW), RISE_ANEW)
        self.damping = min(max(self.damping * factor, LEAST), LARGEST)

    def remember(self, loss: float, promised: float, points: list[float], step: int) -> None:
        """A step that is being taken."""
        self.level = loss if self.step != step - 1 or self.level <= 0 else self.level**DECAY * loss ** (1 - DECAY)
        self.loss, self.promised, self.points, self.step = loss, promised, points, step

    def state(self) -> dict[str, Any]:
        """For a checkpoint: plain numbers."""
        return asdict(self)
