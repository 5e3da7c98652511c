"""Several methods on one task, over seeds: the runs and their summary."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ddpnopt.lab.data import Dataset
from ddpnopt.lab.errors import ExperimentError
from ddpnopt.lab.methods.registry import TRAINED_METHODS, method
from ddpnopt.lab.runs.classification import ClassificationTask
from ddpnopt.lab.runs.config import RunConfig
from ddpnopt.lab.runs.outcome import Outcome, TrainingRecord
from ddpnopt.lab.runs.search import best_rate
from ddpnopt.lab.runs.task import Task
from ddpnopt.lab.runs.training import Progress, train
from ddpnopt.lab.tables import Spread

DEFAULT_METHODS = ("ddpnopt", "sgd-m", "rmsprop", "adam")
# The first of these that takes part is the unit of the time per step; momentum adds next to nothing.
TIME_UNITS = ("sgd", "sgd-m")


@dataclass(frozen=True)
class ComparedMethod:
    """A method to compare, at its default learning rate or at a given one."""

    method: str
    lr: float | None = None

    @classmethod
    def parse(cls, text: str, known: Sequence[str] = TRAINED_METHODS) -> ComparedMethod:
        """Reads `adam` or `adam@0.003`."""
        name, at, rate = text.strip().partition("@")
        method(name, known)
        if not at:
            return cls(name)
        try:
            return cls(name, float(rate))
        except ValueError:
            raise ExperimentError(f"{text.strip()!r}: what follows the @ must be a learning rate") from None


@dataclass(frozen=True)
class ComparedRun:
    """One run with every step of it."""

    config: RunConfig
    outcome: Outcome

    @property
    def record(self) -> TrainingRecord:
        """Every step, of a run that this process has computed."""
        assert self.outcome.details is not None
        return self.outcome.details.record

    @property
    def losses(self) -> list[float]:
        """One per step; of a run from a store the means over a fiftieth of the run."""
        if self.outcome.details is not None:
            return self.record.losses
        ends, means = self.outcome.curve.steps, self.outcome.curve.losses
        return [mean for a, b, mean in zip([0, *ends], ends, means, strict=False) for _ in range(b - a)]


@dataclass(frozen=True)
class Summary:
    """One row of the table."""

    label: str
    method: str
    lr: float
    train_loss: Spread
    metric: Spread
    """The accuracy in percent, or what the task is judged by."""
    relative_step_time: float
    """In units of SGD's; NaN where SGD was not run."""
    diverged: int
    runs: Sequence[ComparedRun]


@dataclass(frozen=True)
class Comparison:
    """All runs of one task."""

    task: Task
    title: str
    note: str
    summaries: list[Summary]
    metric: str = "test accuracy %"
    column: str = "test_accuracy"
    """The name of the metric in the file of numbers."""

    @property
    def stem(self) -> str:
        """In the names of files."""
        return self.task.dataset if isinstance(self.task, ClassificationTask) else self.task.name

    @property
    def best(self) -> float:
        """The best mean of the metric; NaN if every run diverged."""
        found = [row.metric.mean for row in self.summaries if math.isfinite(row.metric.mean)]
        choose = max if self.task.higher_is_better else min
        return choose(found, default=math.nan)

    def __str__(self) -> str:
        from ddpnopt.lab.comparison.output import text  # here: it imports this module

        return text(self)

    def save(self, folder: Path | str) -> list[Path]:
        """Write the picture and the numbers of every run; returns the files."""
        from ddpnopt.lab.comparison.output import save

        return save(self, Path(folder))

    def records(self) -> Iterator[dict[str, Any]]:
        """One line per run."""
        for run in (run for summary in self.summaries for run in summary.runs):
            yield {
                **{name: value for name, value in self.task.identity.items() if value is not None},
                "method": run.config.method,
                "lr": run.outcome.lr,
                "seed": run.config.seed,
                "train_loss": run.outcome.train_loss,
                self.column: run.outcome.metric,
                "seconds": run.outcome.seconds,
                "step_ms": 1000 * run.outcome.step_seconds,
                "steps": run.outcome.steps,
                "diverged": run.outcome.diverged,
            }


def compare(
    task: ClassificationTask,
    methods: Sequence[ComparedMethod],
    seeds: Sequence[int],
    *,
    data_dir: Path | None = None,
    images: Dataset | None = None,
    on_step: Callable[[ComparedMethod, int, Progress], None] = lambda *_: None,
) -> Comparison:
    """Run every method with every seed; all methods of a seed share the data, the weights and the batches."""
    found: dict[ComparedMethod, list[ComparedRun]] = {each: [] for each in methods}
    note = ""
    for seed in seeds:
        dataset = task.load(seed, data_dir=data_dir, images=images)
        note = dataset.note
        for each in found:

            def forward(progress: Progress, each: ComparedMethod = each, seed: int = seed) -> None:
                on_step(each, seed, progress)

            config = RunConfig(each.method, task, each.lr, seed=seed)
            found[each].append(ComparedRun(config, train(config, task.problem_on(dataset, seed), on_step=forward)))
    title = f"{task.dataset.replace('_', '-').upper()}, {task.network.upper()}, batch size {task.batch_size}"
    return Comparison(task, title, note, summarise(found))


def tuned(
    task: ClassificationTask,
    methods: Sequence[ComparedMethod],
    *,
    data_dir: Path | None = None,
    images: Dataset | None = None,
) -> list[ComparedMethod]:
    """The methods with the learning rates that held-out training data choose, where there is a grid."""

    def compute(configs: Sequence[RunConfig]) -> list[Outcome]:
        data = (task.load(c.seed, validation=c.validation, data_dir=data_dir, images=images) for c in configs)
        return [train(c, task.problem_on(each, c.seed)) for c, each in zip(configs, data, strict=True)]

    def choose(each: ComparedMethod) -> ComparedMethod:
        if each.lr is not None or not method(each.method).grid:
            return each
        return replace(each, lr=best_rate(RunConfig(each.method, task), compute).lr)

    return [choose(each) for each in methods]


def summarise(found: dict[ComparedMethod, list[ComparedRun]]) -> list[Summary]:
    """One summary per method, in the given order."""
    names = [each.method for each in found]
    unit = _time_unit(found)
    summaries = []
    for each, runs in found.items():
        label, lr = method(each.method).label, runs[0].outcome.lr
        if names.count(each.method) > 1:  # the same method at several learning rates
            label = f"{label}, lr {lr:g}"
        summaries.append(
            Summary(
                label=label,
                method=each.method,
                lr=lr,
                train_loss=Spread.of(run.outcome.train_loss for run in runs),
                metric=Spread.of(run.outcome.metric for run in runs),
                relative_step_time=_step_time(runs) / unit,
                diverged=sum(run.outcome.diverged for run in runs),
                runs=runs,
            )
        )
    return summaries


def _step_time(runs: Iterable[ComparedRun]) -> float:
    """The median step of the run that other work on the machine disturbed least."""
    return min((run.outcome.step_seconds for run in runs if run.outcome.steps), default=math.nan)


def _time_unit(found: dict[ComparedMethod, list[ComparedRun]]) -> float:
    for name in TIME_UNITS:
        runs = [run for each, runs in found.items() if each.method == name for run in runs]
        if runs:
            return _step_time(runs)
    return math.nan
