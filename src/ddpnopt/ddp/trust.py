"""How far the linear model of the residuals is trusted: the damping of steps with derivatives in the loss.

The loss after such a step is known when the next one begins. Where the points have stayed the same, it is compared with
what the model has predicted, as in the method of Levenberg and Marquardt: with rho the logarithm of the actual over
that of the predicted decrease, the damping is multiplied by

    1 - (2 rho - 1)^3        between 1/3 and 3   (Nielsen)

Where points are drawn anew in each step, the prediction is that for samples left out of the batch, and both
logarithms are running means: their sums over steps telescope, so that the noise of single batches cancels. A step after
which the loss is larger is taken back at the beginning of the next one, all but a quarter of it.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

START = 1.0  # damping of the first step, relative to the mean diagonal of A
LEAST, LARGEST = 1e-10, 1e6
FASTEST = 3.0, 3.0  # fall and rise of the damping from step to step
FASTEST_ANEW = 1.7, 1.1  # … where the points are drawn anew: noise alone must not stop the training
DECAY = 0.8  # of the running means
KEPT = 0.25  # of a step that is taken back
RISE = 0.01  # of the loss, relative, that is tolerated on the same points
RISE_ANEW = 3.0  # … on others
RETRIES = 8  # how often in a row a step is taken back
RESOLUTION = 1e-6  # relative changes of the loss below this are rounding errors


@dataclass
class Trust:
    """The damping of the next step, and what the last one has promised."""

    damping: float = START
    step: int = -1  # the optimizer's count at the last step with derivatives
    loss: float = 0.0  # before that step
    promised: float = 0.0  # predicted after it
    points: list[float] = field(default_factory=list)  # a number for each set of samples, which tells it from others
    retries: int = 0
    actual: float = 0.0  # running means of the logarithms, where the points change
    predicted: float = 0.0

    def drawn_anew(self, points: list[float]) -> list[bool]:
        """Which sets of samples are not those of the step before."""
        known = len(points) == len(self.points)
        return [known and new != old for new, old in zip(points, self.points if known else points, strict=True)]

    def takes_back(self, loss: float, points: list[float], step: int) -> bool:
        """Judge the last step by the loss after it; True if most of it is to be taken back."""
        if self.step != step - 1 or self.loss <= 0:
            return False
        same = not any(self.drawn_anew(points))
        if not loss <= self.loss * (1 + (RISE if same else RISE_ANEW)) and self.retries < RETRIES:
            self.damping = min(self.damping / KEPT, LARGEST)
            self.retries += 1
            self.step = step
            self.promised = self.loss - KEPT * (2 - KEPT) * (self.loss - self.promised)  # of the part that is kept
            return True
        self.retries = 0
        if loss > 0:
            self._learn(math.log(self.loss / loss), same)
        return False

    def _learn(self, actual: float, same: bool) -> None:
        predicted = math.log(self.loss / max(self.promised, 1e-30 * self.loss))
        if same and predicted < RESOLUTION:
            return
        fall, rise = FASTEST
        if not same:
            actual = self.actual = DECAY * self.actual + (1 - DECAY) * actual
            predicted = self.predicted = DECAY * self.predicted + (1 - DECAY) * predicted
            fall, rise = FASTEST_ANEW
        rho = actual / predicted if predicted > 0 else 0.0  # the samples left out would lose: less of a step
        factor = 1 - (2 * min(max(rho, -1.0), 1.0) - 1) ** 3
        self.damping = min(max(self.damping * min(max(factor, 1 / fall), rise), LEAST), LARGEST)

    def remember(self, loss: float, promised: float, points: list[float], step: int) -> None:
        """A step that is being taken."""
        self.loss, self.promised, self.points, self.step = loss, promised, points, step

    def state(self) -> dict[str, Any]:
        """For a checkpoint: plain numbers."""
        return asdict(self)
