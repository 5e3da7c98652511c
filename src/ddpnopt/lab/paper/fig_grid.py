"""Fig. 4a and its absolute tables, and the same for Adam: what feedback changes over learning rates and eps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import pandas as pd

from ddpnopt.lab.paper.fig_grid_drawing import draw
from ddpnopt.lab.paper.fig_grid_published import ADAM, GRIDS, Grid
from ddpnopt.lab.paper.item import Claim, Context, Item, Picture, Result, Table
from ddpnopt.lab.paper.item_runs import SeedRuns, how_run, outcomes, seeds_of
from ddpnopt.lab.runs.classification import ClassificationTask
from ddpnopt.lab.runs.config import RunConfig
from ddpnopt.lab.tables import Spread

# Batches of 8 and ten epochs come closest to the paper's SGD columns.
EPOCHS, BATCH_SIZE = 10, 8
QUICK_EPOCHS = 2
MEASURES = ("training loss", "accuracy (%)")


@dataclass(frozen=True)
class Cells:
    """The results of one grid: rows of learning rates, the baseline first, then the eps."""

    grid: Grid
    rows: Sequence[Sequence[SeedRuns]]

    def values(self, measure: str) -> list[list[list[float]]]:
        return [[each.losses() if measure == MEASURES[0] else each.accuracies() for each in row] for row in self.rows]

    def improvements(self, measure: str) -> list[list[Spread]]:
        """How much better than the baseline of the same seed, above zero for better: one row per learning rate."""
        sign = -1 if measure == MEASURES[0] else 1
        return [
            [Spread.of(sign * (a - b) for a, b in zip(cell, row[0], strict=True)) for cell in row[1:]]
            for row in self.values(measure)
        ]

    def paper(self, measure: str) -> Sequence[Sequence[float]]:
        return self.grid.loss if measure == MEASURES[0] else self.grid.accuracy


def config(context: Context, method: str, lr: float, seed: int, eps: float = 0.0) -> RunConfig:
    """A run on DIGITS as in the figure."""
    options = {"vxx_reg": eps} if eps else {}
    return RunConfig(method, digits_task(context), lr, options, seed)


def digits_task(context: Context) -> ClassificationTask:
    """What all runs of the figure train."""
    return ClassificationTask("digits", "fcn", QUICK_EPOCHS if context.quick else EPOCHS, BATCH_SIZE)


def cells(context: Context, grids: Sequence[Grid]) -> list[Cells]:
    """All runs of the grids; seed by seed, so that the first ones are useful early."""
    seeds, task = seeds_of(context, 10), digits_task(context)
    wanted = {
        (grid.base, lr, eps, seed): config(context, grid.ours if eps else grid.base, lr, seed, eps)
        for seed in seeds
        for grid in grids
        for lr in grid.lrs
        for eps in (0.0, *grid.eps)
    }
    found = dict(zip(wanted, outcomes(context, list(wanted.values()), "DIGITS"), strict=True))
    return [
        Cells(
            grid,
            [
                [SeedRuns([found[grid.base, lr, eps, seed] for seed in seeds], task) for eps in (0.0, *grid.eps)]
                for lr in grid.lrs
            ],
        )
        for grid in grids
    ]


def run_grid(context: Context) -> Result:
    return _result(context, GRIDS, "grid")


def run_adam(context: Context) -> Result:
    return _result(context, (ADAM,), "adam")


def _result(context: Context, grids: Sequence[Grid], name: str) -> Result:
    found = cells(context, grids)
    claims = [claim for each in found for claim in (_consistent(each), _grows(each))]
    verdict = "; ".join(f"{c.text[0].lower()}{c.text[1:]}: {_word(c.holds)}" for c in claims)
    caption = (
        "What feedback changes on DIGITS, over learning rate and eps on V_xx: mean over seeds of the difference to the "
        "baseline with the same learning rate, weights and batches; blue is better. The paper: the improvement "
        f"remains consistent across most settings and becomes obvious as the learning rate increases. Here: {verdict}."
    )
    picture = Picture(name, caption, draw(found, MEASURES), _series(found))
    first = found[0].rows[0][0]
    lost = sum(cell.diverged for each in found for row in each.rows for cell in row)
    notes = [
        how_run(context, digits_task(context), len(first.runs))
        + " The paper does not give batch size and epochs; these come closest to its SGD columns.",
        "DDPNOpt is value='full' with the Hessian of the cross-entropy and the guard, which keeps V_xx positive.",
    ]
    if lost:
        notes.append(
            f"{lost} runs diverged; they count as guessing (accuracy 10 %, loss {first.task.classes} classes' log)."
        )
    if name == "adam":
        notes.append("The paper shows this as a picture without numbers; learning rates and eps are those of RMSprop.")
    return Result(claims, [t for each in found for t in _tables(each)], [picture], notes)


def _word(holds: bool | None) -> str:
    return "open" if holds is None else "holds" if holds else "does not hold"


def _consistent(each: Cells) -> Claim:
    ours, paper = [], []
    good = []
    for measure in MEASURES:
        gains = [cell.mean for row in each.improvements(measure) for cell in row]
        better = sum(gain > 0 for gain in gains)
        good.append(better > len(gains) / 2)
        ours.append(f"{measure.partition(' (')[0]} better in {better} of {len(gains)} cells")
        rows = each.paper(measure)
        if rows:
            sign = -1 if measure == MEASURES[0] else 1
            better = sum(sign * (cell - row[0]) > 0 for row in rows for cell in row[1:])
            paper.append(f"{better} of {sum(len(row) - 1 for row in rows)}")
    return Claim(
        f"{each.grid.label}: feedback improves on the baseline in most settings",
        all(good),
        "loss better in {}, accuracy in {}".format(*paper) if paper else "most (a picture)",
        ", ".join(ours),
    )


def _grows(each: Cells) -> Claim:
    """Compare the mean gap in training loss at the larger two learning rates with that at the smaller two."""
    gaps = [fmean(cell.mean for cell in row) for row in each.improvements(MEASURES[0])]
    low, high = fmean(gaps[:2]), fmean(gaps[2:])
    text = "mean gap in training loss {:.3f} at the smaller two, {:.3f} at the larger two"
    paper = "a picture"
    if each.grid.loss:
        known = [fmean(row[0] - cell for cell in row[1:]) for row in each.grid.loss]
        paper = text.format(fmean(known[:2]), fmean(known[2:]))
    return Claim(
        f"{each.grid.label}: the gap becomes larger as the learning rate increases",
        high > low,
        paper,
        text.format(low, high),
    )


def _tables(each: Cells) -> list[Table]:
    """Absolute values, the paper's in brackets."""
    grid = each.grid
    made = []
    for measure, stem, digits in zip(MEASURES, ("loss", "accuracy"), (4, 2), strict=True):
        paper = each.paper(measure)
        rows = []
        for i, (lr, row) in enumerate(zip(grid.lrs, each.values(measure), strict=True)):
            texts = [
                Spread.of(cell).text(digits) + (f" ({paper[i][j]:.{digits}f})" if paper else "")
                for j, cell in enumerate(row)
            ]
            headings = [grid.label, *(f"DDPNOpt, eps {eps:g}" for eps in grid.eps)]
            rows.append({"learning rate": f"{lr:g}", **dict(zip(headings, texts, strict=True))})
        brackets = " In brackets the paper's." if paper else ""
        caption = f"{measure.capitalize()} of {grid.label} and of DDPNOpt with its curvature on DIGITS.{brackets}"
        made.append(Table(f"{stem}-{grid.base}", caption, pd.DataFrame(rows)))
    return made


def _series(found: Sequence[Cells]) -> list[dict[str, object]]:
    return [
        {
            "panel": f"{each.grid.label}: improvement in {measure}",
            "label": f"eps {eps:g}",
            "x": list(each.grid.lrs),
            "y": [row[column].mean for row in gains],
            "spread": [row[column].std for row in gains],
        }
        for measure in MEASURES
        for each in found
        for gains in [each.improvements(measure)]
        for column, eps in enumerate(each.grid.eps)
    ]


GRID_ITEM = Item(
    "fig-grid",
    "What feedback changes over learning rates and eps",
    "Fig. 4a and Tables 9 and 10",
    run_grid,
    stored=True,
)
ADAM_ITEM = Item("fig-adam", "What feedback changes for Adam", "Fig. 9 of the appendix", run_adam, stored=True)
