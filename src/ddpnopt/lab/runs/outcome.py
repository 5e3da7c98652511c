"""What a run gave: the numbers that the store keeps, and details that live as long as the process."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate, pairwise
from statistics import median
from typing import Any

from torch import Tensor

SAMPLES = 50
SETTLED = 50
"""Steps after which those that are made again count."""


@dataclass(frozen=True)
class Curve:
    """The training loss at about fifty moments: each is the mean of the batches since the one before."""

    steps: list[int]
    seconds: list[float]
    """Wall-clock time of training so far."""
    cpu_seconds: list[float]
    losses: list[float]


@dataclass
class TrainingRecord:
    """Every step of a training loop."""

    losses: list[float] = field(default_factory=list)
    """The loss of every batch before its step."""
    epoch_losses: list[float] = field(default_factory=list)
    """Their mean over each finished epoch."""
    step_seconds: list[float] = field(default_factory=list)
    step_cpu_seconds: list[float] = field(default_factory=list)
    diverged: bool = False

    @property
    def median_step_seconds(self) -> float:
        """The median over the steps: other work on the machine disturbs it less than the mean."""
        return median(self.step_seconds) if self.step_seconds else math.nan

    @property
    def final_loss(self) -> float:
        """The mean over the last tenth of the steps."""
        last = self.losses[-max(1, len(self.losses) // 10) :]
        return sum(last) / len(last) if last else math.nan

    def curve(self) -> Curve:
        """The record in about fifty bins."""
        return sampled_curve(list(accumulate(self.step_seconds)), list(accumulate(self.step_cpu_seconds)), self.losses)


@dataclass(frozen=True, eq=False)
class RunDetails:
    """What the store does not keep."""

    record: TrainingRecord
    weights: dict[str, Tensor] = field(repr=False)


@dataclass(frozen=True)
class Outcome:
    """What a run gave."""

    metric: float
    """On the test set (or the held-out data), such as the accuracy in percent; NaN if the run diverged."""
    lr: float
    """The learning rate that was used, the optimizer's own default included."""
    seconds: float
    """Of training, without loading and evaluating."""
    cpu_seconds: float
    steps: int
    diverged: bool
    error: str
    """The exception that ended the run, if there was one."""
    curve: Curve
    train_loss: float = math.nan
    """On the whole training set at the end; NaN if the run diverged."""
    together: int = 1
    """How many runs were computed at once as one stack; the seconds are this run's share."""
    update_norms: list[float] = field(default_factory=list)
    """Mean norm of each layer's update after the first epoch, where the task asks for it."""
    repeated: int | None = None
    """Steps that DDPNOpt made again, shorter, after the first fifty; None where it is not known."""
    undone: int | None = None
    """Steps that it gave up."""
    details: RunDetails | None = field(default=None, repr=False, compare=False)

    @property
    def accuracy(self) -> float:
        """The metric of a classification task, in percent."""
        return self.metric

    @property
    def step_seconds(self) -> float:
        """Of a usual step: the median over all steps, or over the moments of the curve where those are not known."""
        if self.details is not None:
            return self.details.record.median_step_seconds
        ends = list(zip([0, *self.curve.steps], [0.0, *self.curve.seconds], strict=True))
        spans = [(later - sooner) / (b - a) for (a, sooner), (b, later) in pairwise(ends)]
        return median(spans) if spans else math.nan

    def to_json(self) -> str:
        stored = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "details"}
        return json.dumps({**stored, "curve": vars(self.curve)})

    @classmethod
    def from_json(cls, text: str) -> Outcome:
        content: dict[str, Any] = json.loads(text)
        if "accuracy" in content:  # version 0.1.0 knew no other metric
            content["metric"] = content.pop("accuracy")
        return cls(**{**content, "curve": Curve(**content["curve"])})


def sampled_curve(seconds: Sequence[float], cpu_seconds: Sequence[float], losses: Sequence[float]) -> Curve:
    """About fifty bins of the steps; `seconds` and `cpu_seconds` count from the start of training."""
    count = len(losses)
    ends = sorted({round(count * (i + 1) / SAMPLES) for i in range(SAMPLES)} - {0})
    return Curve(
        ends,
        [round(seconds[end - 1], 5) for end in ends],
        [round(cpu_seconds[end - 1], 5) for end in ends],
        [sum(losses[a:b]) / (b - a) for a, b in pairwise([0, *ends])],
    )
