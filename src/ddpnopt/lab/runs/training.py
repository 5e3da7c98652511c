"""One training run: a configuration in, a result out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from ddpnopt.lab.data import Dataset, load
from ddpnopt.lab.errors import ExperimentError
from ddpnopt.lab.methods import is_convolutional, make_optimizer
from ddpnopt.lab.networks import build
from ddpnopt.lab.runs.checkpoints import Checkpoints

LossFunction = Callable[[Tensor, Tensor], Tensor]
# Larger ones are slower: the activations of a CNN would outgrow what the allocator keeps.
EVALUATION_BATCH = 250
VALIDATION_FRACTION = 0.2


@dataclass(frozen=True)
class RunConfig:
    """All that decides a run: the same configuration gives the same curve.

    `seed` draws the split or subset of the data, the weights and the order of the batches.
    """

    method: str
    dataset: str
    network: str = "fcn"
    lr: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    epochs: int = 10
    batch_size: int = 16
    n_train: int | None = None
    validation: bool = False
    """Hold out a fifth of the training data in place of the test set, which tuning must not see."""

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size"):
            if getattr(self, name) < 1:
                raise ExperimentError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.lr is not None and not (math.isfinite(self.lr) and self.lr > 0):
            raise ExperimentError(f"the learning rate must be positive, not {self.lr:g}")


@dataclass(frozen=True)
class Progress:
    """What a run tells while it goes on."""

    step: int
    steps: int
    epoch: int
    loss: float


@dataclass(frozen=True, eq=False)
class RunResult:
    """What a run gave."""

    config: RunConfig
    lr: float
    """The learning rate that was used, the optimizer's own default included."""
    losses: list[float]
    """The loss of every batch before its step."""
    epoch_losses: list[float]
    """Their mean over each finished epoch."""
    train_loss: float
    """On the whole training set at the end."""
    test_accuracy: float
    """In percent."""
    seconds: float
    """Of training alone, without loading and evaluating."""
    step_seconds: float
    """The median over the steps: other work on the machine disturbs it less than the mean."""
    steps: int
    diverged: bool
    weights: dict[str, Tensor] = field(repr=False, default_factory=dict)


@dataclass
class Fit:
    """The record of one call of `fit`."""

    losses: list[float] = field(default_factory=list)
    epoch_losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    diverged: bool = False


def fit(
    model: nn.Module,
    optimizer: Optimizer,
    dataset: Dataset,
    *,
    epochs: int,
    batch_size: int,
    generator: torch.Generator,
    loss_function: LossFunction = F.cross_entropy,
    on_step: Callable[[Progress], None] = lambda _: None,
    checkpoints: Checkpoints | None = None,
) -> Fit:
    """The ordinary training loop; it stops at the first loss that is not finite."""
    record = Fit()
    per_epoch = math.ceil(len(dataset.y_train) / batch_size)
    first_epoch, done = checkpoints.resume(model, optimizer, generator, record) if checkpoints else (0, 0)
    model.train()
    for epoch in range(first_epoch, epochs):
        drawn = generator.get_state()
        for batch, (x, y) in enumerate(dataset.batches(batch_size, generator)):
            if epoch == first_epoch and batch < done:
                continue
            start = time.perf_counter()
            optimizer.zero_grad()
            loss = loss_function(model(x), y)
            value = float(loss.detach())
            if not math.isfinite(value):
                record.diverged = True
                return record
            loss.backward()
            try:
                optimizer.step()
            except FloatingPointError:  # an optimizer that refuses a step which is not finite
                record.diverged = True
                return record
            record.step_seconds.append(time.perf_counter() - start)
            record.losses.append(value)
            if checkpoints is not None:
                checkpoints.after_step(model, optimizer, record, epoch, batch + 1, drawn)
            on_step(Progress(len(record.losses), epochs * per_epoch, epoch, value))
        record.epoch_losses.append(sum(record.losses[-per_epoch:]) / per_epoch)
    return record


def set_mode(optimizer: Optimizer, mode: str) -> None:
    """Switch to "train" or "eval": some optimizers keep two sets of weights, one to train and one to use."""
    switch = getattr(optimizer, mode, None)
    if switch is not None:
        switch()


@torch.no_grad()
def evaluate(
    model: nn.Module, x: Tensor, y: Tensor, loss_function: LossFunction = F.cross_entropy
) -> tuple[float, float]:
    """Mean loss and accuracy in percent over all of `x`."""
    model.eval()
    loss, correct = 0.0, 0
    for start in range(0, len(x), EVALUATION_BATCH):
        part = slice(start, start + EVALUATION_BATCH)
        outputs = model(x[part])
        loss += float(loss_function(outputs, y[part])) * len(y[part])
        correct += int((outputs.argmax(1) == y[part]).sum())
    return loss / len(x), 100 * correct / len(x)


@contextmanager
def one_thread_for_small(model: nn.Module) -> Iterator[None]:
    """One thread for a network without convolutions.

    Its matrices are so small that a second thread costs more than it brings, ten times more when the cores
    have other work to do.
    """
    before = torch.get_num_threads()
    if not is_convolutional(model):
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def prepare(config: RunConfig, data_dir: Path | None = None, images: Dataset | None = None) -> Dataset:
    """The data of a run: the split, and the subset if one is asked for.

    An image set is large and has one split for all seeds: who runs several seeds loads it once as `images`.
    """
    dataset = images or load(config.dataset, seed=config.seed, data_dir=data_dir)
    if config.n_train is not None:
        dataset = dataset.subset(config.n_train, config.seed)
    return dataset.split_validation(VALIDATION_FRACTION, config.seed) if config.validation else dataset


def train(
    config: RunConfig,
    dataset: Dataset | None = None,
    *,
    data_dir: Path | None = None,
    on_step: Callable[[Progress], None] = lambda _: None,
    checkpoints: Checkpoints | None = None,
) -> RunResult:
    """Trains as `config` says, on `dataset` in place of the named one if it is given."""
    if dataset is None:
        dataset = prepare(config, data_dir)
    model = build(config.network, dataset, config.seed)
    optimizer = make_optimizer(config.method, model, config.lr, **config.options)
    generator = torch.Generator().manual_seed(config.seed)
    with one_thread_for_small(model), torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)  # for layers that draw, such as dropout
        record = fit(
            model,
            optimizer,
            dataset,
            epochs=config.epochs,
            batch_size=config.batch_size,
            generator=generator,
            on_step=on_step,
            checkpoints=checkpoints,
        )
    set_mode(optimizer, "eval")
    train_loss, _ = evaluate(model, dataset.x_train, dataset.y_train)
    _, test_accuracy = evaluate(model, dataset.x_test, dataset.y_test)
    return RunResult(
        config=config,
        lr=float(optimizer.param_groups[0]["lr"]),
        losses=record.losses,
        epoch_losses=record.epoch_losses,
        train_loss=train_loss,
        test_accuracy=test_accuracy,
        seconds=sum(record.step_seconds),
        step_seconds=median(record.step_seconds) if record.step_seconds else math.nan,
        steps=len(record.losses),
        diverged=record.diverged or not math.isfinite(train_loss),
        weights=model.state_dict(),
    )
