"""The runs on DIGITS that `fig-grid`, `fig-adam`, `fig-dynamics` and `tables6-8` share.

Network, batch size and epochs are those whose SGD and RMSprop columns come closest to the paper's, which gives none of
them exactly; EKFAC has the settings of its public code's example. Nothing was chosen by what DDPNOpt does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ddpnopt.lab.paper.fig_grid_published import Grid
from ddpnopt.lab.paper.item import Context
from ddpnopt.lab.paper.item_runs import SeedRuns, outcomes, seeds_of
from ddpnopt.lab.paper.readings import Reading, options
from ddpnopt.lab.runs.classification import ClassificationTask
from ddpnopt.lab.runs.config import RunConfig
from ddpnopt.lab.tables import Spread

NETWORK, EPOCHS, BATCH_SIZE = "fcn-6", 8, 8
QUICK_EPOCHS = 1
SEEDS = 10
COMPARED_SEEDS, QUICK_COMPARED_SEEDS = 4, 1
"""Of the readings beside each other."""
LOSS, ACCURACY = "training loss", "accuracy (%)"
MEASURES = (LOSS, ACCURACY)
SETUP = (
    "The paper gives neither batch size nor epochs, and a range for the network: these come closest to its SGD and "
    "RMSprop columns. EKFAC has damping 0.1 and refreshes every 100 steps, as its public code's example."
)


def digits_task(context: Context) -> ClassificationTask:
    """What all runs of the figures train."""
    return ClassificationTask("digits", NETWORK, QUICK_EPOCHS if context.quick else EPOCHS, BATCH_SIZE)


def config(
    context: Context, method: str, lr: float, seed: int, eps: float = 0.0, reading: Reading | None = None
) -> RunConfig:
    """A run on DIGITS as in the figures, in the reading that is judged if no other is given."""
    chosen = options(method, reading or context.judged) | ({"vxx_reg": eps} if eps else {})
    return RunConfig(method, digits_task(context), lr, chosen, seed)


@dataclass(frozen=True)
class Cells:
    """The results of one grid: rows of learning rates, the baseline first, then the eps."""

    grid: Grid
    rows: Sequence[Sequence[SeedRuns]]

    def values(self, measure: str) -> list[list[list[float]]]:
        return [[each.losses() if measure == LOSS else each.accuracies() for each in row] for row in self.rows]

    def gains(self, measure: str) -> list[list[list[float]]]:
        """How much better than the baseline of the same seed, above zero for better: rows, cells, seeds.

        Nothing is gained over a baseline that diverged.
        """
        sign = -1 if measure == LOSS else 1
        most = [[0.0 if run.diverged else math.inf for run in row[0].runs] for row in self.rows]
        return [
            [[min(sign * (a - b), top) for a, b, top in zip(cell, row[0], tops, strict=True)] for cell in row[1:]]
            for row, tops in zip(self.values(measure), most, strict=True)
        ]

    def improvements(self, measure: str) -> list[list[Spread]]:
        return [[Spread.of(cell) for cell in row] for row in self.gains(measure)]

    def paper(self, measure: str) -> Sequence[Sequence[float]]:
        return self.grid.loss if measure == LOSS else self.grid.accuracy

    @property
    def seeds(self) -> int:
        return len(self.rows[0][0].runs)

    @property
    def diverged(self) -> int:
        return sum(cell.diverged for row in self.rows for cell in row)


def cells(
    context: Context,
    grids: Sequence[Grid],
    reading: Reading | None = None,
    seeds: range | None = None,
    most: Mapping[Grid, int] = MappingProxyType({}),
) -> list[Cells]:
    """All runs of the grids, at most so many seeds of each; seed by seed, so that the first ones are useful early."""
    everyone, task, reading = seeds or seeds_of(context, SEEDS), digits_task(context), reading or context.judged
    chosen = {grid: everyone[: most.get(grid)] for grid in grids}
    wanted = {
        (grid.base, lr, eps, seed): config(context, grid.ours if eps else grid.base, lr, seed, eps, reading)
        for seed in everyone
        for grid in grids
        if seed in chosen[grid]
        for lr in grid.lrs
        for eps in (0.0, *grid.eps)
    }
    found = dict(zip(wanted, outcomes(context, list(wanted.values()), f"DIGITS, {reading.label}"), strict=True))
    return [
        Cells(
            grid,
            [
                [SeedRuns([found[grid.base, lr, eps, seed] for seed in chosen[grid]], task) for eps in (0.0, *grid.eps)]
                for lr in grid.lrs
            ],
        )
        for grid in grids
    ]


def compared_seeds(context: Context) -> range:
    """The seeds on which the readings are compared."""
    return range(min(len(seeds_of(context, SEEDS)), QUICK_COMPARED_SEEDS if context.quick else COMPARED_SEEDS))
