"""Choosing a learning rate on held-out training data."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ddpnopt.lab.data import Dataset
from ddpnopt.lab.errors import ExperimentError
from ddpnopt.lab.methods import method
from ddpnopt.lab.runs.training import Progress, RunConfig, prepare, train


@dataclass(frozen=True)
class Candidate:
    """A learning rate and what it reached, averaged over the seeds."""

    lr: float
    validation_accuracy: float
    train_loss: float


def tune(
    config: RunConfig,
    grid: Sequence[float] | None = None,
    *,
    seeds: Sequence[int] = (0,),
    data_dir: Path | None = None,
    images: Dataset | None = None,
    on_step: Callable[[Progress], None] = lambda _: None,
) -> list[Candidate]:
    """Every learning rate of the grid (the method's own unless given), best first.

    A fifth of the training data is held out for it; the test set is not touched. Ties in accuracy go to the
    lower training loss.
    """
    rates = method(config.method).grid if grid is None else grid
    if not rates:
        raise ExperimentError(f"{config.method} has no learning rates to search")
    config = replace(config, validation=True)
    data = {seed: prepare(replace(config, seed=seed), data_dir, images) for seed in seeds}
    found = []
    for lr in rates:
        runs = [train(replace(config, lr=lr, seed=seed), data[seed], on_step=on_step) for seed in seeds]
        accuracy = sum(run.test_accuracy for run in runs) / len(runs)
        loss = sum(math.inf if run.diverged else run.train_loss for run in runs) / len(runs)
        found.append(Candidate(lr, accuracy, loss))
    return sorted(found, key=lambda candidate: (-candidate.validation_accuracy, candidate.train_loss))
