"""What the items made of many trainings share: their runs in one store, and the numbers of several seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddpnopt.lab.paper.item import Context
from ddpnopt.lab.runs.classification import ClassificationTask
from ddpnopt.lab.runs.config import RunConfig
from ddpnopt.lab.runs.outcome import Outcome
from ddpnopt.lab.runs.search import counted
from ddpnopt.lab.runs.store import Store
from ddpnopt.lab.runs.sweep import collect
from ddpnopt.lab.tables import Spread


def outcomes(context: Context, configs: Sequence[RunConfig], what: str) -> list[Outcome]:
    """The outcome of every configuration: from the store, and what is missing is computed now."""
    if not configs:  # nothing to tune, or no method that can train the network
        return []
    context.store_path.parent.mkdir(parents=True, exist_ok=True)
    store = Store(context.store_path)
    try:
        found = collect(
            configs,
            store,
            jobs=context.jobs,
            data_dir=context.data_dir,
            ray=context.ray,
            on_run=lambda done, total, *_: context.on_progress(what, done, total),
        )
        context.used.update(config.key for config in configs)
        return [found[config] for config in configs]
    finally:
        store.close()


LEARNED = 0.9
"""The share of the loss of guessing below which a run has learned something."""


@dataclass(frozen=True)
class SeedRuns:
    """One setting over its seeds. A run that diverged counts as guessing: accuracy 100/C, loss log C."""

    runs: Sequence[Outcome]
    task: ClassificationTask

    @property
    def diverged(self) -> int:
        return sum(run.diverged for run in self.runs)

    @property
    def learned(self) -> list[bool]:
        """Which runs learned something: they did not diverge, and their training loss is not near that of guessing."""
        return [not run.diverged and run.train_loss <= LEARNED * self.task.untrained.loss for run in self.runs]

    def accuracies(self) -> list[float]:
        return [counted(run, self.task).metric for run in self.runs]

    def losses(self) -> list[float]:
        return [counted(run, self.task).loss for run in self.runs]

    @property
    def accuracy(self) -> Spread:
        return Spread.of(self.accuracies())

    @property
    def loss(self) -> Spread:
        return Spread.of(self.losses())


def seeds_of(context: Context, usual: int, quick: int = 2) -> range:
    """The seeds of an item: the user's number, else a few for a quick look, else the item's own number."""
    return range(context.seeds or (quick if context.quick else usual))


def setup(task: ClassificationTask) -> str:
    """Data, network and length of the training."""
    part = "" if task.n_train is None else f" on {task.n_train:,} of the training images"
    epochs = f"{task.epochs} epoch{'s' if task.epochs > 1 else ''}"
    return f"{task.dataset}, {task.network}{part}: {epochs} of batches of {task.batch_size}"


def how_run(context: Context, task: ClassificationTask, seeds: int) -> str:
    """The set-up in one line, for the notes."""
    quick = " Shortened by --quick: the numbers only show that it works." if context.quick else ""
    return f"{setup(task)}, {seeds} seed{'s' if seeds > 1 else ''}.{quick}"
