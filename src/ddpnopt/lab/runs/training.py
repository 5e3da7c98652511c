"""One training run: a configuration in, an outcome out."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from ddpnopt import DDPNOpt
from ddpnopt.lab.data import Dataset
from ddpnopt.lab.errors import NoDefaultRateError, NotApplicableError, TaskError
from ddpnopt.lab.methods.method import is_convolutional
from ddpnopt.lab.methods.registry import make_optimizer
from ddpnopt.lab.runs.checkpoints import Checkpoints
from ddpnopt.lab.runs.classification import DatasetProblem, LossFunction
from ddpnopt.lab.runs.config import RunConfig
from ddpnopt.lab.runs.outcome import SETTLED, Outcome, RunDetails, TrainingRecord
from ddpnopt.lab.runs.task import TrainingProblem


@dataclass(frozen=True)
class Progress:
    """What a run reports after each step."""

    step: int
    steps: int
    epoch: int
    loss: float


OnStep = Callable[[Progress], None]
LARGE = 1_000_000
"""Parameters from which on a network without convolutions takes all threads."""


def run_epochs(
    problem: TrainingProblem,
    optimizer: Optimizer,
    generator: torch.Generator,
    *,
    on_step: OnStep = lambda _: None,
    checkpoints: Checkpoints | None = None,
    record: TrainingRecord | None = None,
) -> TrainingRecord:
    """The ordinary training loop; it stops at the first loss that is not finite.

    With `record` the steps are written there, so that they are known even if an exception ends the loop.
    """
    record = TrainingRecord() if record is None else record
    model, per_epoch = problem.model, problem.steps_per_epoch
    first_epoch, done = checkpoints.resume(model, optimizer, generator, record) if checkpoints else (0, 0)
    model.train()
    for epoch in range(first_epoch, problem.epochs):
        drawn = generator.get_state()
        for number, batch in enumerate(problem.epoch(generator)):
            if epoch == first_epoch and number < done:
                continue
            start, cpu_start = time.perf_counter(), time.process_time()
            optimizer.zero_grad()
            loss = problem.loss(batch)
            value = float(loss.detach())
            if not math.isfinite(value):
                record.diverged = True
                return record
            loss.backward()
            try:
                if isinstance(optimizer, DDPNOpt) and getattr(problem, "hands_loss_over", False):
                    optimizer.step(loss=loss)
                else:
                    optimizer.step()
            except FloatingPointError:  # an optimizer that refuses a step which is not finite
                record.diverged = True
                return record
            record.step_seconds.append(time.perf_counter() - start)
            record.step_cpu_seconds.append(time.process_time() - cpu_start)
            record.losses.append(value)
            if checkpoints is not None:
                checkpoints.after_step(model, optimizer, record, epoch, number + 1, drawn)
            on_step(Progress(len(record.losses), problem.epochs * per_epoch, epoch, value))
        record.epoch_losses.append(sum(record.losses[-per_epoch:]) / per_epoch)
    return record


def fit(
    model: nn.Module,
    optimizer: Optimizer,
    dataset: Dataset,
    *,
    epochs: int,
    batch_size: int,
    generator: torch.Generator,
    loss_function: LossFunction = F.cross_entropy,
    on_step: OnStep = lambda _: None,
    checkpoints: Checkpoints | None = None,
) -> TrainingRecord:
    """`run_epochs` for a model and a data set."""
    problem = DatasetProblem(model, dataset, epochs, batch_size, loss_function)
    return run_epochs(problem, optimizer, generator, on_step=on_step, checkpoints=checkpoints)


def set_mode(optimizer: Optimizer, mode: str) -> None:
    """Switch to "train" or "eval": some optimizers keep two sets of weights, one to train and one to use."""
    switch = getattr(optimizer, mode, None)
    if switch is not None:
        switch()


@contextmanager
def one_thread_for_small(model: nn.Module) -> Iterator[None]:
    """One thread for a small network without convolutions.

    Its matrices are so small that a second thread costs more than it saves, ten times more when the cores are busy.
    """
    before = torch.get_num_threads()
    if not is_convolutional(model) and sum(p.numel() for p in model.parameters()) < LARGE:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def train(
    config: RunConfig,
    problem: TrainingProblem | None = None,
    *,
    data_dir: Path | None = None,
    on_step: OnStep = lambda _: None,
    checkpoints: Checkpoints | None = None,
    record_errors: bool = False,
) -> Outcome:
    """Train and test as `config` says, on `problem` instead of the task's own one if it is given.

    With `record_errors` an exception while training is a run that diverged, and warnings are suppressed.
    """
    if problem is None:
        problem = config.task.problem(config.seed, validation=config.validation, data_dir=data_dir)
    model = problem.model
    optimizer = make_optimizer(config.method, model, config.lr, **config.options)
    set_mode(optimizer, "train")
    lr = float(optimizer.param_groups[0]["lr"])
    record, error = TrainingRecord(), ""
    watch = UpdateNorms(model) if getattr(config.task, "measure_updates", False) else None
    report, early = optimizer.report if isinstance(optimizer, DDPNOpt) else None, 0

    def observe(progress: Progress) -> None:
        nonlocal early
        if report is not None and progress.step == SETTLED:
            early = report.shortened
        if watch is not None:
            watch.after(progress)
        on_step(progress)

    loss = metric = math.nan
    with one_thread_for_small(model), torch.random.fork_rng(devices=[]), _quiet() if record_errors else nullcontext():
        torch.manual_seed(config.seed)  # for layers and losses that draw, such as dropout
        generator = torch.Generator().manual_seed(config.seed)
        try:
            run_epochs(problem, optimizer, generator, on_step=observe, checkpoints=checkpoints, record=record)
        except TaskError:  # says nothing of the method
            raise
        except Exception as failed:  # an eigendecomposition of NaN raises LinAlgError, others what they like
            if not record_errors:
                raise
            record.diverged, error = True, f"{type(failed).__name__}: {failed}"[:300]
    if not record.diverged:
        set_mode(optimizer, "eval")
        loss, metric = problem.evaluate(record)
        record.diverged = not (math.isfinite(loss) and math.isfinite(metric))
    return Outcome(
        metric=math.nan if record.diverged else metric,
        lr=lr,
        seconds=sum(record.step_seconds),
        cpu_seconds=sum(record.step_cpu_seconds),
        steps=len(record.losses),
        diverged=record.diverged,
        error=error,
        curve=record.curve(),
        train_loss=math.nan if record.diverged else loss,
        update_norms=[] if watch is None else watch.means(),
        repeated=None if report is None else report.shortened - early,
        undone=None if report is None else report.undone,
        details=RunDetails(record, model.state_dict()),
    )


class UpdateNorms:
    """The mean norm of each linear layer's update, over the steps after the first epoch."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = [[*module.parameters()] for module in model.modules() if isinstance(module, nn.Linear)]
        self.total, self.steps = torch.zeros(len(self.layers)), 0
        self._before = self._weights()

    def after(self, progress: Progress) -> None:
        now = self._weights()
        if progress.epoch > 0:
            moved = [(new - old).norm() for new, old in zip(now, self._before, strict=True)]
            self.total, self.steps = self.total + torch.stack(moved), self.steps + 1
        self._before = now

    def means(self) -> list[float]:
        return (self.total / self.steps).tolist() if self.steps else []

    def _weights(self) -> list[Tensor]:
        return [torch.cat([p.detach().flatten() for p in layer]) for layer in self.layers]


def perform(config: RunConfig, data_dir: Path | None = None) -> Outcome | None:
    """The outcome of a run of a sweep; None where the method has no default learning rate or does not apply."""
    try:
        outcome = train(config, data_dir=data_dir, record_errors=True)
    except (NoDefaultRateError, NotApplicableError):
        return None
    return replace(outcome, details=None)  # weights are not sent between processes


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
