"""Several methods on one data set, over seeds: the runs, and what they say together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev

import pandas as pd

from ddpnopt.lab.data import Dataset
from ddpnopt.lab.errors import ExperimentError
from ddpnopt.lab.methods import method
from ddpnopt.lab.runs.training import Progress, RunConfig, RunResult, prepare, train
from ddpnopt.lab.runs.tuning import tune

DEFAULT_METHODS = ("ddpnopt", "sgd-m", "rmsprop", "adam")
# The first of these that is present is the unit of the time per step; momentum adds next to nothing.
TIME_UNITS = ("sgd", "sgd-m")


@dataclass(frozen=True)
class Entry:
    """A method to compare, at its default learning rate or at a given one."""

    method: str
    lr: float | None = None

    @classmethod
    def parse(cls, text: str) -> Entry:
        """Reads `adam` or `adam@0.003`."""
        name, at, rate = text.strip().partition("@")
        method(name)
        if not at:
            return cls(name)
        try:
            return cls(name, float(rate))
        except ValueError:
            raise ExperimentError(f"{text.strip()!r}: what follows the @ must be a learning rate") from None


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation over the seeds; the latter is NaN for a single one."""

    mean: float
    std: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        numbers = list(values)
        finite = len(numbers) > 1 and all(map(math.isfinite, numbers))
        return cls(fmean(numbers), stdev(numbers) if finite else math.nan)


@dataclass(frozen=True)
class Summary:
    """One row of the table."""

    label: str
    method: str
    lr: float
    train_loss: Spread
    test_accuracy: Spread
    relative_step_time: float
    """In units of SGD's; NaN where SGD was not run."""
    diverged: int
    results: Sequence[RunResult]


@dataclass(frozen=True)
class Comparison:
    """All runs of one data set."""

    dataset: str
    note: str
    summaries: list[Summary]

    def table(self) -> pd.DataFrame:
        """One line a run."""
        return pd.DataFrame(
            [
                {
                    "dataset": run.config.dataset,
                    "network": run.config.network,
                    "method": run.config.method,
                    "lr": run.lr,
                    "seed": run.config.seed,
                    "epochs": run.config.epochs,
                    "batch_size": run.config.batch_size,
                    "train_loss": run.train_loss,
                    "test_accuracy": run.test_accuracy,
                    "seconds": run.seconds,
                    "step_ms": 1000 * run.step_seconds,
                    "steps": run.steps,
                    "diverged": run.diverged,
                }
                for summary in self.summaries
                for run in summary.results
            ]
        )


def compare(
    base: RunConfig,
    entries: Sequence[Entry],
    seeds: Sequence[int],
    *,
    data_dir: Path | None = None,
    images: Dataset | None = None,
    on_step: Callable[[Entry, int, Progress], None] = lambda *_: None,
) -> Comparison:
    """Runs every entry with every seed; all methods of a seed share the data, the weights and the batches."""
    results: dict[Entry, list[RunResult]] = {entry: [] for entry in entries}
    note = ""
    for seed in seeds:
        config = replace(base, seed=seed)
        dataset = prepare(config, data_dir, images)
        note = dataset.note
        for entry in results:

            def forward(progress: Progress, entry: Entry = entry, seed: int = seed) -> None:
                on_step(entry, seed, progress)

            run = replace(config, method=entry.method, lr=entry.lr)
            results[entry].append(train(run, dataset, on_step=forward))
    return Comparison(base.dataset, note, summarise(results))


def tuned(
    base: RunConfig,
    entries: Sequence[Entry],
    *,
    data_dir: Path | None = None,
    images: Dataset | None = None,
) -> list[Entry]:
    """The entries with the learning rates that held-out training data choose, where there is a grid."""

    def choose(entry: Entry) -> Entry:
        if entry.lr is not None or not method(entry.method).grid:
            return entry
        best = tune(replace(base, method=entry.method), data_dir=data_dir, images=images)[0]
        return replace(entry, lr=best.lr)

    return [choose(entry) for entry in entries]


def summarise(results: dict[Entry, list[RunResult]]) -> list[Summary]:
    """One summary an entry, in the given order."""
    names = [entry.method for entry in results]
    unit = _time_unit(results)
    summaries = []
    for entry, runs in results.items():
        label = method(entry.method).label
        if names.count(entry.method) > 1:  # the same method at several learning rates
            label = f"{label}, lr {runs[0].lr:g}"
        summaries.append(
            Summary(
                label=label,
                method=entry.method,
                lr=runs[0].lr,
                train_loss=Spread.of(run.train_loss for run in runs),
                test_accuracy=Spread.of(run.test_accuracy for run in runs),
                relative_step_time=_step_time(runs) / unit,
                diverged=sum(run.diverged for run in runs),
                results=runs,
            )
        )
    return summaries


def _step_time(runs: Iterable[RunResult]) -> float:
    """The median step of the run that the machine's other work disturbed least."""
    return min((run.step_seconds for run in runs if run.steps), default=math.nan)


def _time_unit(results: dict[Entry, list[RunResult]]) -> float:
    for name in TIME_UNITS:
        runs = [run for entry, runs in results.items() if entry.method == name for run in runs]
        if runs:
            return _step_time(runs)
    return math.nan
