"""What the joint model of one batch says of a step, and what many batches have said together."""

from __future__ import annotations

import math
from dataclasses import dataclass


def mean_and_error(total: float, squares: float, weight: float, decay: float) -> tuple[float, float]:
    """The running mean that these weighted sums are of, and its standard error."""
    mean = total / weight
    return mean, math.sqrt(max(squares / weight - mean**2, 0.0) * (1 - decay) / (1 + decay))


@dataclass(frozen=True)
class Evidence:
    """What the joint model says of a step that asks for all of the loss; everything is relative to the loss."""

    loss: float  # of the batch, above its minimum
    own: float  # first-order decrease of the batch's own loss
    own_curvature: float  # twice the second-order term of it
    unseen: float  # first-order decrease of the loss of samples left out
    unseen_curvature: float
