"""The runs of Table 3: learning rates chosen on held-out data, then runs over the seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pandas as pd

from ddpnopt.lab.data import IMAGE_SETS
from ddpnopt.lab.data.catalogue import status
from ddpnopt.lab.methods.registry import method
from ddpnopt.lab.paper.item import Context, Table
from ddpnopt.lab.paper.item_runs import SeedRuns, how_run, outcomes
from ddpnopt.lab.paper.table3_columns import Column, Size
from ddpnopt.lab.runs.config import RunConfig
from ddpnopt.lab.runs.search import candidates, search


@dataclass(frozen=True)
class TunedMethod:
    """One method on one data set."""

    column: Column
    method: str
    config: RunConfig
    """The best on the held-out data."""
    tried: int
    """How many settings were tried; none where there is nothing to tune."""
    seeds: SeedRuns


def measure(
    context: Context, column: Column, methods: Sequence[str], *, size: Size | None = None, seeds: int | None = None
) -> list[TunedMethod]:
    """Tune and run the methods on one data set; methods that cannot train its network are left out.

    `size` and `seeds` are the column's unless they are given. Learning rates are always chosen on its size for that.
    """
    length, count = size or column.size, seeds or column.seeds
    task = column.task(length)
    bases = [column.config(name, column.tuning) for name in methods if column.possible(name)]
    grids = [candidates(base, column.rates) for base in bases]
    what = f"{column.label}: learning rates"
    ranked = search(grids, column.tuning_seeds, lambda configs: outcomes(context, configs, what))
    best = [found[0].config if found else base for base, found in zip(bases, ranked, strict=True)]
    chosen = [replace(each, task=task) for each in best]
    configs = [replace(each, seed=seed) for each in chosen for seed in range(count)]
    found = iter(outcomes(context, configs, column.label))
    return [
        TunedMethod(column, each.method, each, len(grid), SeedRuns([next(found) for _ in range(count)], task))
        for each, grid in zip(chosen, grids, strict=True)
    ]


def settings_table(entries: Sequence[TunedMethod]) -> Table:
    """What was chosen for each method, and how long it was trained."""
    rows = []
    for each in entries:
        momentum = each.config.options.get("momentum")
        rate = each.seeds.runs[0].lr
        rows.append(
            {
                "data set": each.column.label,
                "method": method(each.method).label,
                "learning rate": f"{rate:g}" + (f", momentum {momentum:g}" if momentum is not None else ""),
                "tried": str(each.tried) if each.tried else "default",
                "samples": "all" if each.seeds.task.n_train is None else f"{each.seeds.task.n_train:,}",
                "epochs": str(each.seeds.task.epochs),
                "diverged": f"{each.seeds.diverged} of {len(each.seeds.runs)}",
            }
        )
    caption = (
        "Learning rates, chosen on a grid over the paper's ranges by the accuracy on a fifth of the training data held "
        "out, never on the test set."
    )
    return Table("settings", caption, pd.DataFrame(rows))


def notes(context: Context, columns: Sequence[Column]) -> list[str]:
    """The set-up of each data set, and how its images differ from the original ones."""
    made = [how_run(context, each.task(each.size), each.seeds) for each in columns]
    images = dict.fromkeys(each.dataset for each in columns if each.dataset in IMAGE_SETS)
    made += [text for name in images if (text := status(name, context.data_dir).note)]
    if images:
        made.append(
            "Image sets: where a number of training images is named, a part of them, drawn again by each seed; --full "
            "takes all of them. Learning rates are chosen on a part in any case."
        )
    return made
