"""What the items made of many trainings share: their runs in one store, and the numbers of several seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ddpnopt.lab.comparison import Spread
from ddpnopt.lab.paper.item import Context
from ddpnopt.lab.runs.job import Training
from ddpnopt.lab.runs.outcome import Outcome
from ddpnopt.lab.runs.store import Store
from ddpnopt.lab.runs.sweep import carry_out, unfinished
from ddpnopt.lab.runs.together import units
from ddpnopt.lab.runs.training import RunConfig

STORE = "runs.sqlite"
BEYOND = 1e3
"""A loss above it is written as one that diverged."""


def outcomes(context: Context, configs: Sequence[RunConfig], what: str) -> list[Outcome]:
    """The outcome of every configuration: out of the store, and what is missing computed now."""
    context.out.mkdir(parents=True, exist_ok=True)
    store = Store(context.out / STORE)
    try:
        wanted = [Training(config) for config in configs]
        missing = unfinished(wanted, store)
        done = len(wanted) - len(missing)
        context.on_progress(what, done, len(wanted))
        work = units(missing)
        for _ in carry_out(work, store, jobs=context.jobs, data_dir=context.data_dir, ray=context.ray):
            done += 1
            context.on_progress(what, done, len(wanted))
        there = store.outcomes()
        return [there[job.key] for job in wanted]
    finally:
        store.close()


@dataclass(frozen=True)
class Seeds:
    """One setting over its seeds. A run that diverged counts as guessing: accuracy 100/C, loss log C."""

    runs: Sequence[Outcome]
    classes: int

    @property
    def diverged(self) -> int:
        return sum(run.diverged for run in self.runs)

    def accuracies(self) -> list[float]:
        return [100 / self.classes if run.diverged else run.accuracy for run in self.runs]

    def losses(self) -> list[float]:
        guess = math.log(self.classes)
        return [guess if run.diverged else run.train_loss for run in self.runs]

    @property
    def accuracy(self) -> Spread:
        return Spread.of(self.accuracies())

    @property
    def loss(self) -> Spread:
        return Spread.of(self.losses())


def shown(spread: Spread, digits: int) -> str:
    """Mean ± standard deviation as text."""
    text = f"{spread.mean:.{digits}f}"
    return f"{text} ± {spread.std:.{digits}f}" if math.isfinite(spread.std) else text


def seeds_of(context: Context, usual: int, quick: int = 2) -> range:
    """The seeds of an item: what the user says, else a few for a quick look, else the item's own number."""
    return range(context.seeds or (quick if context.quick else usual))


def how_run(context: Context, config: RunConfig, seeds: int) -> str:
    """The set-up in one line, for the notes."""
    part = "" if config.n_train is None else f" on {config.n_train:,} of the training images"
    quick = " Shortened by --quick: the numbers only show that it works." if context.quick else ""
    epochs = f"{config.epochs} epoch{'s' if config.epochs > 1 else ''}"
    return (
        f"{config.dataset}, {config.network}{part}: {epochs} of batches of {config.batch_size}, "
        f"{seeds} seed{'s' if seeds > 1 else ''}.{quick}"
    )
