"""The tasks of the paper: a data set, one of the paper's networks, cross-entropy, and the accuracy in percent."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddpnopt.lab import networks
from ddpnopt.lab.baselines import MMCLoss
from ddpnopt.lab.data import IMAGE_SETS, Dataset, canonical, load
from ddpnopt.lab.errors import ExperimentError, UnknownNameError
from ddpnopt.lab.runs.outcome import TrainingRecord
from ddpnopt.lab.runs.task import Evaluation

LossFunction = Callable[[Tensor, Tensor], Tensor]
# Larger ones are slower: the activations of a CNN would not fit into the memory that the allocator reuses.
EVALUATION_BATCH = 250
VALIDATION_FRACTION = 0.2


@dataclass(frozen=True, eq=False)
class Objective:
    """A loss, and how a class is read from the outputs."""

    loss: LossFunction
    predict: Callable[[Tensor], Tensor]


def objective(name: str, classes: int) -> Objective:
    """The cross-entropy, or the MMC loss, which predicts the class of the nearest centre."""
    if name == "cross_entropy":
        return Objective(F.cross_entropy, lambda z: z.argmax(1))
    if name == "mmc":
        mmc = MMCLoss(classes)
        return Objective(mmc, mmc.predict)
    raise UnknownNameError("loss", name, LOSSES)


LOSSES = ("cross_entropy", "mmc")
MMC_UNTRAINED = 50.0
"""The centres have norm 10 and mean zero: half a squared distance of 50 from there."""


@dataclass(frozen=True, eq=False)
class DatasetProblem:
    """A model and a data set in tensors."""

    model: nn.Module
    dataset: Dataset
    epochs: int
    batch_size: int
    loss_function: LossFunction = F.cross_entropy
    predict: Callable[[Tensor], Tensor] = field(default=lambda z: z.argmax(1))

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(len(self.dataset.y_train) / self.batch_size)

    def epoch(self, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        return self.dataset.batches(self.batch_size, generator)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return self.loss_function(self.model(x), y)

    def evaluate(self, record: TrainingRecord) -> Evaluation:
        """Training loss and test accuracy; NaN where the outputs on the test set are not finite."""
        data = self.dataset
        test_loss, accuracy = evaluate(self.model, data.x_test, data.y_test, self.loss_function, self.predict)
        if not math.isfinite(test_loss):
            return Evaluation(math.nan, math.nan)
        loss, _ = evaluate(self.model, data.x_train, data.y_train, self.loss_function)
        return Evaluation(loss, accuracy)


@dataclass(frozen=True)
class ClassificationTask:
    """`dataset` and `network` by name; `seed` of a run draws the split or subset, the weights and the batches."""

    dataset: str
    network: str = "fcn"
    epochs: int = 10
    batch_size: int = 16
    n_train: int | None = None
    """Training samples, drawn by the seed; None takes all."""
    name: str = field(default="", compare=False)
    label: str = field(default="", compare=False)
    loss: str = "cross_entropy"
    measure_updates: bool = False
    """Whether the outcome holds the norms of the updates."""

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size"):
            if getattr(self, name) < 1:
                raise ExperimentError(f"{name} must be at least 1, not {getattr(self, name)}")
        objective(self.loss, self.classes)
        if not self.name:
            object.__setattr__(self, "name", f"{self.dataset}-{self.network}")

    @property
    def identity(self) -> Mapping[str, Any]:
        """All but the names."""
        # what was added later is there only if it is used: the keys of older runs stay what they were
        extra = {} if self.loss == "cross_entropy" else {"loss": self.loss}
        if self.measure_updates:
            extra["measure_updates"] = "yes"
        return {
            "dataset": self.dataset,
            "network": self.network,
            "epochs": self.epochs,
            "batch_size": self.batch_size,
            "n_train": self.n_train,
            **extra,
        }

    @property
    def classes(self) -> int:
        if self.dataset.startswith("gaussian-"):
            return int(self.dataset.removeprefix("gaussian-"))
        return 3 if self.dataset == "wine" else 10

    @property
    def chance(self) -> float:
        """The accuracy of guessing, in percent."""
        return 100 / self.classes

    @property
    def untrained(self) -> Evaluation:
        """Guessing: loss log C, accuracy 100 / C."""
        return Evaluation(MMC_UNTRAINED if self.loss == "mmc" else math.log(self.classes), self.chance)

    @property
    def higher_is_better(self) -> bool:
        return True

    def load(
        self, seed: int, *, validation: bool = False, data_dir: Path | None = None, images: Dataset | None = None
    ) -> Dataset:
        """The split, subset or validation split of a seed; an image set that is loaded already can be passed."""
        if images is not None:
            return prepared(images, self.n_train, seed, validation)
        return _cached(canonical(self.dataset), self.n_train, seed, validation, data_dir)

    def build(self, data: Dataset, seed: int) -> nn.Module:
        """The network, its weights drawn from `seed`."""
        return networks.build(self.network, data, seed)

    def problem_on(self, data: Dataset, seed: int) -> DatasetProblem:
        """The problem on data that are loaded already."""
        chosen = objective(self.loss, self.classes)
        return DatasetProblem(self.build(data, seed), data, self.epochs, self.batch_size, chosen.loss, chosen.predict)

    def problem(self, seed: int, *, validation: bool = False, data_dir: Path | None = None) -> DatasetProblem:
        return self.problem_on(self.load(seed, validation=validation, data_dir=data_dir), seed)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    loss_function: LossFunction = F.cross_entropy,
    predict: Callable[[Tensor], Tensor] = lambda z: z.argmax(1),
) -> Evaluation:
    """Mean loss and accuracy in percent over all of `x`."""
    model.eval()
    loss, correct = 0.0, 0
    for start in range(0, len(x), EVALUATION_BATCH):
        part = slice(start, start + EVALUATION_BATCH)
        outputs = model(x[part])
        loss += float(loss_function(outputs, y[part])) * len(y[part])
        correct += int((predict(outputs) == y[part]).sum())
    return Evaluation(loss / len(x), 100 * correct / len(x))


def prepared(dataset: Dataset, n_train: int | None, seed: int, validation: bool) -> Dataset:
    """The subset, then the validation split, if they are asked for."""
    if n_train is not None:
        dataset = dataset.subset(n_train, seed)
    return dataset.split_validation(VALIDATION_FRACTION, seed) if validation else dataset


@lru_cache(maxsize=12)
def _cached(name: str, n_train: int | None, seed: int, validation: bool, data_dir: Path | None) -> Dataset:
    """Kept in the process for the next run: all subsets of an image set share its test images, and cost little."""
    whole = _images(name, data_dir) if name in IMAGE_SETS else load(name, seed=seed, data_dir=data_dir)
    return prepared(whole, n_train, seed, validation)


@lru_cache(maxsize=1)
def _images(name: str, data_dir: Path | None) -> Dataset:
    """An image set has one split for all seeds; it takes up to a gigabyte, so only one is kept."""
    return load(name, data_dir=data_dir)
