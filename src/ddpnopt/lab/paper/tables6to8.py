"""Tables 6 to 8: each baseline at its best learning rate, and DDPNOpt at the same one."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from ddpnopt.lab.paper.fig_grid import config, digits_task
from ddpnopt.lab.paper.item import Claim, Context, Item, Result, Table
from ddpnopt.lab.paper.item_runs import SeedRuns, how_run, outcomes, seeds_of


@dataclass(frozen=True)
class PublishedTable:
    """One of the three tables: the baseline and DDPNOpt."""

    number: int
    base: str
    ours: str
    label: str
    lr: float
    loss: tuple[float, float]
    accuracy: tuple[float, float]


TABLES = (
    PublishedTable(6, "sgd", "ddpnopt-sgd", "SGD", 0.1, (0.035, 0.032), (95.36, 95.52)),
    PublishedTable(7, "rmsprop", "ddpnopt-rmsprop", "RMSprop", 0.001, (0.058, 0.052), (94.33, 94.63)),
    PublishedTable(8, "ekfac", "ddpnopt-ekfac", "EKFAC", 0.03, (0.074, 0.067), (95.24, 95.19)),
)


def run(context: Context) -> Result:
    seeds = seeds_of(context, 10)
    wanted = [
        config(context, m, paper.lr, seed) for paper in TABLES for m in (paper.base, paper.ours) for seed in seeds
    ]
    found = iter(outcomes(context, wanted, "DIGITS"))
    claims, tables = [], []
    for paper in TABLES:
        base, ours = (SeedRuns([next(found) for _ in seeds], digits_task(context)) for _ in range(2))
        claims += _claims(paper, base, ours)
        frame = pd.DataFrame(
            [
                {
                    "": name,
                    paper.label: pair[0].text(digits),
                    f"{paper.label}, paper": f"{known[0]:.{digits}f}",
                    "DDPNOpt": pair[1].text(digits),
                    "DDPNOpt, paper": f"{known[1]:.{digits}f}",
                }
                for name, pair, known, digits in (
                    ("training loss", (base.loss, ours.loss), paper.loss, 3),
                    ("accuracy (%)", (base.accuracy, ours.accuracy), paper.accuracy, 2),
                )
            ]
        )
        caption = f"Table {paper.number}: {paper.label} and DDPNOpt with its curvature, learning rate {paper.lr:g}."
        tables.append(Table(f"table{paper.number}", caption, frame))
    notes = [
        how_run(context, digits_task(context), len(seeds)),
        "The paper does not say which eps on V_xx its tables have; here it is zero.",
    ]
    return Result(claims, tables, notes=notes)


def _claims(paper: PublishedTable, base: SeedRuns, ours: SeedRuns) -> list[Claim]:
    """What the paper's own numbers say, in either direction."""
    made = []
    for name, pair, known, digits, less in (
        ("training loss", (base.loss, ours.loss), paper.loss, 3, True),
        ("accuracy", (base.accuracy, ours.accuracy), paper.accuracy, 2, False),
    ):
        better = (known[1] < known[0]) == less
        came = (pair[1].mean < pair[0].mean) == less
        word = "improves" if better else "does not improve"
        made.append(
            Claim(
                f"Table {paper.number}: feedback {word} the {name} of {paper.label} at learning rate {paper.lr:g}",
                came == better,
                f"{known[0]:.{digits}f} to {known[1]:.{digits}f}",
                f"{pair[0].text(digits)} to {pair[1].text(digits)}",
            )
        )
    return made


ITEM = Item("tables6-8", "Best-tuned baselines with and without feedback", "Tables 6 to 8", run, stored=True)
