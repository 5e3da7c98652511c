"""Accuracies of methods over data sets: learning rates chosen on held-out data, then runs over the seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pandas as pd

from ddpnopt.lab.data import IMAGE_SETS
from ddpnopt.lab.data.catalogue import status
from ddpnopt.lab.methods import method
from ddpnopt.lab.paper.columns import Column
from ddpnopt.lab.paper.item import Context, Table
from ddpnopt.lab.paper.search import Chosen, Wish, search
from ddpnopt.lab.paper.sweeps import Seeds, how_run, outcomes


@dataclass(frozen=True)
class Entry:
    """One method on one data set."""

    column: Column
    method: str
    chosen: Chosen
    seeds: Seeds


def measure(context: Context, column: Column, methods: Sequence[str]) -> list[Entry]:
    """Tunes and runs the methods on one data set; those that it cannot hold are left out."""
    possible = [name for name in methods if column.possible(name)]
    wishes = [Wish(column.config(name), column.rates, column.tuning_seeds, column.classes) for name in possible]
    chosen = search(context, wishes, f"{column.label}: learning rates")
    pairs = list(zip(possible, chosen, strict=True))
    configs = [replace(each.config, seed=seed) for name, each in pairs for seed in range(column.seeds_of(name))]
    found = iter(outcomes(context, configs, column.label))
    return [
        Entry(column, name, each, Seeds([next(found) for _ in range(column.seeds_of(name))], column.classes))
        for name, each in pairs
    ]


def settings_table(entries: Sequence[Entry]) -> Table:
    """What was chosen for each method, and how long it was trained."""
    rows = []
    for each in entries:
        config = each.chosen.config
        momentum = config.options.get("momentum")
        rate = each.seeds.runs[0].lr
        rows.append(
            {
                "data set": each.column.label,
                "method": method(each.method).label,
                "learning rate": f"{rate:g}" + (f", momentum {momentum:g}" if momentum is not None else ""),
                "tried": str(each.chosen.trials) if each.chosen.trials else "default",
                "epochs": str(config.epochs),
                "diverged": f"{each.seeds.diverged} of {len(each.seeds.runs)}",
            }
        )
    caption = (
        "Learning rates, chosen through Optuna over the paper's ranges by the accuracy on a fifth of the training data "
        "held out, never on the test set."
    )
    return Table("settings", caption, pd.DataFrame(rows))


def notes(context: Context, columns: Sequence[Column]) -> list[str]:
    """The set-up of each data set, and how its images differ from the original ones."""
    made = [how_run(context, each.config("adam"), each.seeds) for each in columns]
    images = dict.fromkeys(each.dataset for each in columns if each.dataset in IMAGE_SETS)
    made += [text for name in images if (text := status(name, context.data_dir).note)]
    if not context.full and any(each.n_train is not None for each in columns):
        made.append(
            "Image sets: a part of the training images, drawn anew by each seed, so that two cores can carry it; "
            "--full takes all."
        )
    return made
