"""A task that is no classification, with batches without end: fit a parabola, judged by the squared error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddpnopt.lab.runs.outcome import TrainingRecord
from ddpnopt.lab.runs.task import Evaluation


class ParabolaProblem:
    """y = x^2 on [-1, 1]."""

    epochs = 1

    def __init__(self, seed: int, steps: int, validation: bool) -> None:
        self.steps_per_epoch = steps
        held_out = 1000 + 2 * seed + validation
        self.x = 2 * torch.rand(100, 1, generator=torch.Generator().manual_seed(held_out)) - 1
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))

    def epoch(self, generator: torch.Generator) -> Iterator[Tensor]:
        for _ in range(self.steps_per_epoch):
            yield 2 * torch.rand(16, 1, generator=generator) - 1

    def loss(self, batch: Tensor) -> Tensor:
        return F.mse_loss(self.model(batch), batch.square())

    @torch.no_grad()
    def evaluate(self, record: TrainingRecord) -> Evaluation:
        return Evaluation(record.final_loss, float(F.mse_loss(self.model.eval()(self.x), self.x.square())))


@dataclass(frozen=True)
class Parabola:
    """The task."""

    steps: int = 200
    name: str = "parabola"

    @property
    def identity(self) -> Mapping[str, Any]:
        return {"task": self.name, "steps": self.steps}

    @property
    def untrained(self) -> Evaluation:
        return Evaluation(0.2, 0.2)

    @property
    def higher_is_better(self) -> bool:
        return False

    def problem(self, seed: int, *, validation: bool = False, data_dir: Path | None = None) -> ParabolaProblem:
        return ParabolaProblem(seed, self.steps, validation)
