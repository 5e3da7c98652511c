"""What a training run gave, as it is kept in the store."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from ddpnopt.lab.runs.training import Progress

SAMPLES = 50


@dataclass(frozen=True)
class Curve:
    """The training loss at about fifty moments: each is the mean of the batches since the one before."""

    steps: list[int]
    seconds: list[float]
    """Wall-clock time of training so far."""
    cpu_seconds: list[float]
    losses: list[float]


@dataclass(frozen=True)
class Outcome:
    """What a run gave."""

    accuracy: float
    """On the test set (or what stands in for it), in percent; of a run that diverged NaN."""
    lr: float
    """The learning rate that was used, the default included."""
    seconds: float
    cpu_seconds: float
    steps: int
    diverged: bool
    error: str
    curve: Curve
    train_loss: float = math.nan
    """On the whole training set at the end; NaN where it was not asked for or the run diverged."""
    together: int = 1
    """Trained at once with so many others; the seconds are its share."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Outcome:
        content: dict[str, Any] = json.loads(text)
        return cls(**{**content, "curve": Curve(**content["curve"])})


def curve(seconds: Sequence[float], cpu_seconds: Sequence[float], losses: Sequence[float]) -> Curve:
    """The record of every step in about fifty bins."""
    count = len(losses)
    ends = sorted({round(count * (i + 1) / SAMPLES) for i in range(SAMPLES)} - {0})
    return Curve(
        ends,
        [round(seconds[end - 1], 5) for end in ends],
        [round(cpu_seconds[end - 1], 5) for end in ends],
        [sum(losses[a:b]) / (b - a) for a, b in pairwise([0, *ends])],
    )


class Stopwatch:
    """Loss, wall-clock and processor time after every step."""

    def __init__(self) -> None:
        self.start, self.cpu_start = time.perf_counter(), time.process_time()
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.losses: list[float] = []

    def __call__(self, now: Progress) -> None:
        self.seconds.append(time.perf_counter() - self.start)
        self.cpu_seconds.append(time.process_time() - self.cpu_start)
        self.losses.append(now.loss)

    def curve(self) -> Curve:
        return curve(self.seconds, self.cpu_seconds, self.losses)
