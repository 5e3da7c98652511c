"""A task that is no classification: fit a parabola, judged by the squared error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddpnopt.lab.data import Dataset
from ddpnopt.lab.runs.task import Evaluation


@dataclass(frozen=True)
class Parabola:
    """y = x^2 on [-1, 1]."""

    epochs: int = 20
    batch_size: int = 16
    name: str = "parabola"

    @property
    def identity(self) -> Mapping[str, Any]:
        return {"task": self.name, "epochs": self.epochs, "batch_size": self.batch_size}

    @property
    def untrained(self) -> Evaluation:
        return Evaluation(0.2, 0.2)

    @property
    def higher_is_better(self) -> bool:
        return False

    def load(self, seed: int, *, validation: bool = False, data_dir: Path | None = None) -> Dataset:
        x = 2 * torch.rand(200, 1, generator=torch.Generator().manual_seed(seed)) - 1
        whole = Dataset(self.name, x[:160], x[:160].square(), x[160:], x[160:].square(), 1)
        return whole.split_validation(0.2, seed) if validation else whole

    def build(self, data: Dataset, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(outputs, targets)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, x: Tensor, y: Tensor) -> Evaluation:
        error = float(F.mse_loss(model.eval()(x), y))
        return Evaluation(error, error)
