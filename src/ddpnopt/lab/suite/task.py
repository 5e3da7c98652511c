"""What a task of the suite is: a model, data in three splits, a loss as users write it, a metric on held-out data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, ...]
LossOf = Callable[[nn.Module, Batch], Tensor]
Measure = Callable[[nn.Module, Batch], float]
Augment = Callable[[Batch, torch.Generator], Batch]
SplitName = Literal["validation", "test"]
Better = Literal["higher", "lower"]

# Losses that draw noise (VAE, diffusion) are measured with the same noise each time.
EVALUATION_SEED = 2021


@dataclass(frozen=True)
class Splits:
    """Tensors of equal first dimension per split; the metric of a split is computed in one go."""

    train: Batch
    validation: Batch
    test: Batch


@dataclass(frozen=True)
class Setup:
    """What the function behind a task returns; the weights are drawn from the seed set by `SuiteTask.build`.

    `chance` is the test metric without any learning: the most frequent class, the mean target, the mean picture,
    the frequencies of the characters, the untrained policy. A run that diverges is given this metric.
    """

    model: nn.Module
    splits: Splits
    loss: LossOf
    measure: Measure
    chance: float
    augment: Augment | None = None


class SuiteProblem:
    """One model to train, with its data."""

    def __init__(self, setup: Setup, batch_size: int) -> None:
        self.model = setup.model
        self.splits = setup.splits
        self.chance = setup.chance
        self.batch_size = batch_size
        self._loss = setup.loss
        self._measure = setup.measure
        self._augment = setup.augment

    def batches(self, generator: torch.Generator) -> Iterator[Batch]:
        """Batches without end: shuffled epochs, all of the same size, what is left of an epoch dropped."""
        train = self.splits.train
        while True:
            order = torch.randperm(len(train[0]), generator=generator)
            for rows in order.split(self.batch_size):
                if len(rows) == self.batch_size:
                    batch = tuple(tensor[rows] for tensor in train)
                    yield batch if self._augment is None else self._augment(batch, generator)

    def loss(self, batch: Batch) -> Tensor:
        """Run the model on the batch; the scalar to call `backward` on."""
        return self._loss(self.model, batch)

    def evaluate(self, split: SplitName = "validation") -> float:
        """The task's metric on held-out data, in evaluation mode; leaves the model in the mode it was in."""
        data = self.splits.validation if split == "validation" else self.splits.test
        training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                torch.manual_seed(EVALUATION_SEED)
                return self._measure(self.model, data)
        finally:
            self.model.train(training)


@dataclass(frozen=True)
class SuiteTask:
    """A task by name. Sealed tasks are kept for the final comparison: no choice of method may be based on them."""

    name: str
    family: str
    metric: str
    better: Better
    sealed: bool
    steps: int
    batch_size: int
    build: Callable[[int], SuiteProblem]


def suite_task(
    family: str, metric: str, better: Better, steps: int, batch_size: int, sealed: bool = False
) -> Callable[[Callable[[], Setup]], SuiteTask]:
    """Turn a function that makes a `Setup` into the task of the same name."""

    def decorate(make: Callable[[], Setup]) -> SuiteTask:
        def build(seed: int) -> SuiteProblem:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                return SuiteProblem(make(), batch_size)

        return SuiteTask(make.__name__, family, metric, better, sealed, steps, batch_size, build)

    return decorate
