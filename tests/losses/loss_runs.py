"""One training run of a loss, multiplied by a factor."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from loss_tasks import LossTask
from torch import nn

from ddpnopt import DDPNOpt

FACTORS = (1.0, 0.01, 100.0)
RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
USUAL_RATE = 1e-3
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


@dataclass(frozen=True)
class Run:
    """Losses without the factor, on all of the training data."""

    before: float
    after: float
    figure: float  # on the test data: the error rate, or the loss
    messages: tuple[str, ...] = ()  # warnings of DDPNOpt
    repeated: int = 0
    kind: str | None = None  # what the loss was recognised as

    @property
    def decrease(self) -> float:
        return self.before - self.after if math.isfinite(self.after) else -math.inf


def run(task: LossTask, make: MakeOptimizer, steps: int, factor: float = 1.0, seed: int = 0) -> Run:
    """The same start and the same batches for each optimizer and factor."""
    train, test = task.split()
    torch.manual_seed(seed)
    model = task.network()
    with torch.no_grad():
        before = float(task.loss(model, train))
    opt = make(model)
    order = torch.Generator().manual_seed(seed)
    rest: list[torch.Tensor] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            if not rest:
                rest = [
                    b for b in torch.randperm(len(train[0]), generator=order).split(task.batch) if len(b) == task.batch
                ]
            chosen = rest.pop()
            opt.zero_grad()
            (factor * task.loss(model, tuple(t[chosen] for t in train))).backward()
            opt.step()
    messages = tuple(str(w.message) for w in caught if w.category.__module__.startswith("ddpnopt"))
    with torch.no_grad():
        after = float(task.loss(model, train))
    report = getattr(opt, "report", None)
    counts = (0, None) if report is None else (report.shortened, report.loss)
    return Run(before, after, task.figure(model, test), messages, *counts)


def ddpnopt(task: LossTask, steps: int, factor: float = 1.0) -> Run:
    return run(task, DDPNOpt, steps, factor)


def adamw(task: LossTask, steps: int, factor: float = 1.0, rate: float = USUAL_RATE) -> Run:
    return run(task, lambda model: torch.optim.AdamW(model.parameters(), lr=rate), steps, factor)
