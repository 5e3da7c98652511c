"""Every baseline on WINE and DIGITS, beside the accuracies of the paper's Table 3."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from ddpnopt.lab.comparison import Comparison, Spread, Summary
from ddpnopt.lab.methods import method
from ddpnopt.lab.presets import preset
from ddpnopt.lab.runs.training import RunConfig, RunResult, prepare, train

DATASETS = ("wine", "digits")
# Table 3's columns; DDPNOpt there has the adaptive diagonal for fully connected networks.
TABLE_3 = {
    "wine": {
        "sgd-m": 94.35, "rmsprop": 98.10, "adam": 98.13, "ekfac": 94.60, "emsa": 93.56, "vanilla-ddp": 98.00,
        "ddpnopt-rmsprop": 98.18,
    },
    "digits": {
        "sgd-m": 95.36, "rmsprop": 94.33, "adam": 94.98, "ekfac": 95.24, "emsa": 94.87, "vanilla-ddp": 91.68,
        "ddpnopt-rmsprop": 95.13,
    },
}  # fmt: skip
METHODS = ("sgd", "sgd-m", "rmsprop", "adam", "kfac", "ekfac", "sgd-vgr", "emsa", "vanilla-ddp", "ddpnopt-rmsprop")
# A step of these takes about a hundred times as long as one of SGD.
SLOW = ("emsa", "vanilla-ddp")
# E-MSA has arrived after these; more would only take longer.
EPOCHS = {("emsa", "wine"): 10, ("emsa", "digits"): 8}
# The least damping at which vanilla DDP is stable to the end, of 1, 10, 20, 30 and 50 on held-out training data (see
# docs/baselines.md); on WINE the default is.
OPTIONS: dict[tuple[str, str], dict[str, float]] = {("vanilla-ddp", "digits"): {"damping": 30.0}}


@dataclass(frozen=True)
class Row:
    """One method on one data set, over the seeds."""

    dataset: str
    label: str
    epochs: int
    lr: float
    train_loss: Spread
    accuracy: Spread
    paper: float | None
    step_ms: float
    runs: Sequence[RunResult]


def study(
    datasets: Iterable[str],
    methods: Iterable[str],
    seeds: Sequence[int],
    *,
    slow_seeds: int | None = None,
    max_epochs: int | None = None,
    on_run: Callable[[str, str, int], None] = lambda *_: None,
) -> list[Row]:
    """All runs; the methods of a seed share data, weights and order of the batches.

    E-MSA and vanilla DDP take the first `slow_seeds` of the seeds, all of them if it is None.
    """
    methods = list(methods)
    rows = []
    for dataset in datasets:
        results: dict[str, list[RunResult]] = {name: [] for name in methods}
        for number, seed in enumerate(seeds):
            data = prepare(RunConfig("sgd", dataset, seed=seed))
            for name in methods:
                if name in SLOW and slow_seeds is not None and number >= slow_seeds:
                    continue
                on_run(dataset, name, seed)
                results[name].append(train(replace(configuration(name, dataset, max_epochs), seed=seed), data))
        rows += [_row(dataset, name, runs) for name, runs in results.items()]
    return rows


def configuration(name: str, dataset: str, max_epochs: int | None = None) -> RunConfig:
    """The data set's preset, with the epochs that a slow method has time for and the damping it needs."""
    chosen = preset(dataset)
    epochs = EPOCHS.get((name, dataset), chosen.epochs)
    if max_epochs is not None:
        epochs = min(epochs, max_epochs)
    options = OPTIONS.get((name, dataset), {})
    return RunConfig(name, dataset, chosen.network, options=options, epochs=epochs, batch_size=chosen.batch_size)


def _row(dataset: str, name: str, runs: list[RunResult]) -> Row:
    return Row(
        dataset=dataset,
        label=method(name).label,
        epochs=runs[0].config.epochs,
        lr=runs[0].lr,
        train_loss=Spread.of(run.train_loss for run in runs),
        accuracy=Spread.of(run.test_accuracy for run in runs),
        paper=TABLE_3.get(dataset, {}).get(name),
        step_ms=1000 * min((run.step_seconds for run in runs if run.steps), default=math.nan),
        runs=runs,
    )


def runs_table(rows: Iterable[Row]) -> pd.DataFrame:
    """One line a run."""
    parts = [
        Comparison(
            row.dataset,
            "",
            [Summary(row.label, row.label, row.lr, row.train_loss, row.accuracy, math.nan, 0, row.runs)],
        ).table()
        for row in rows
    ]
    return pd.concat(parts, ignore_index=True)


HEADINGS = ("data set", "method", "lr", "epochs", "seeds", "train loss", "accuracy %", "paper %", "ms a step")


def cells(row: Row) -> tuple[str, ...]:
    """The row as text, one cell a heading."""
    return (
        row.dataset,
        row.label,
        f"{row.lr:g}",
        str(row.epochs),
        str(len(row.runs)),
        _spread(row.train_loss, 3),
        _spread(row.accuracy, 2),
        "" if row.paper is None else f"{row.paper:.2f}",
        f"{row.step_ms:.1f}",
    )


def save(rows: list[Row], folder: Path, title: str, about: str) -> list[Path]:
    """The runs as CSV and the table as Markdown, with `about` between title and table."""
    numbers, page = folder / "baselines.csv", folder / "baselines.md"
    runs_table(rows).to_csv(numbers, index=False)
    lines = [HEADINGS, tuple("---" for _ in HEADINGS), *(cells(row) for row in rows)]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    page.write_text(f"# {title}\n\n{about}\n\n{text}\n", encoding="utf-8")
    return [numbers, page]


def _spread(spread: Spread, digits: int) -> str:
    if not math.isfinite(spread.mean):
        return "diverged"
    text = f"{spread.mean:.{digits}f}"
    return f"{text} ± {spread.std:.{digits}f}" if math.isfinite(spread.std) else text
