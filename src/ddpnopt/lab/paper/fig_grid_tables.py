"""The tables of `fig-grid`: absolute values, the baselines' distance to the paper's, and the readings side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

import pandas as pd

from ddpnopt.lab.paper.digits_runs import ACCURACY, LOSS, MEASURES, Cells
from ddpnopt.lab.paper.item import Table
from ddpnopt.lab.paper.readings import PAPER, READINGS, Reading
from ddpnopt.lab.tables import Spread

CLOSE = 0.2
"""Relative distance up to which a baseline's training loss counts as the paper's."""


def tables(each: Cells) -> list[Table]:
    """Training loss and accuracy of all cells, the paper's in brackets."""
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


def baselines(found: Sequence[Cells]) -> Table:
    """How close the columns of the baselines are to the paper's: the set-up, before any feedback."""
    rows = []
    for each in found:
        for i, lr in enumerate(each.grid.lrs):
            loss, accuracy = (Spread.of(each.values(measure)[i][0]) for measure in (LOSS, ACCURACY))
            known = each.grid.loss[i][0]
            away = loss.mean / known - 1
            error = loss.std / math.sqrt(each.seeds)
            rows.append(
                {
                    "baseline": each.grid.label,
                    "learning rate": f"{lr:g}",
                    "training loss": loss.text(3),
                    "paper": f"{known:.3f}",
                    "distance": f"{100 * away:+.0f} %",
                    f"within {100 * CLOSE:.0f} %": "yes" if abs(away) <= CLOSE else "within two errors"
                    if abs(loss.mean - known) <= 2 * error else "no",
                    "accuracy (%)": accuracy.text(2),
                    "paper's accuracy": f"{each.grid.accuracy[i][0]:.2f}",
                }
            )  # fmt: skip
    caption = (
        "The baselines' own columns and their distance to the paper's: the set-up was chosen on the columns of SGD and "
        "RMSprop alone."
    )
    return Table("baselines", caption, pd.DataFrame(rows))


def distance(each: Cells) -> float:
    """Mean absolute logarithm of training loss over the paper's, over the cells of DDPNOpt."""
    ratios = [
        math.log(fmean(cell) / known)
        for row, paper in zip(each.values(LOSS), each.grid.loss, strict=True)
        for cell, known in zip(row[1:], paper[1:], strict=True)
    ]
    return fmean(abs(ratio) for ratio in ratios)


def readings_table(found: Mapping[Reading, Sequence[Cells]]) -> Table:
    """For each reading and curvature: cells that are better, gaps, and the distance to the paper's numbers."""
    rows = [_reading_row(reading.label, each, _mean_gaps(each)) for reading, cells in found.items() for each in cells]
    rows += [_paper_row(each) for each in next(iter(found.values())) if each.grid.loss]
    first = next(iter(found.values()))[0]
    overall = {
        reading.label: fmean(distance(each) for each in cells)
        for reading, cells in found.items()
        if all(each.grid.loss for each in cells)
    }
    caption = f"The readings of V_xx side by side, seeds 0 to {first.seeds - 1}."
    if overall:
        words = ", ".join(f"{label} {value:.2f}" for label, value in overall.items())
        caption += (
            " Distance: mean absolute logarithm of DDPNOpt's training losses over the paper's. Over all curvatures: "
            f"{words}. The tables above have the reading '{READINGS[PAPER].label}'."
        )
    return Table("readings", caption, pd.DataFrame(rows))


def _reading_row(label: str, each: Cells, gaps: tuple[float, float]) -> dict[str, str]:
    better = [sum(cell.mean > 0 for row in each.improvements(measure) for cell in row) for measure in MEASURES]
    total = sum(len(row) - 1 for row in each.rows)
    return {
        "V_xx": label,
        "curvature of": each.grid.label,
        "loss better": f"{better[0]} of {total}",
        "accuracy better": f"{better[1]} of {total}",
        "gap, smaller two rates": f"{gaps[0]:.3f}",
        "gap, larger two rates": f"{gaps[1]:.3f}",
        "distance": f"{distance(each):.2f}" if each.grid.loss else "",
        "diverged": str(sum(cell.diverged for row in each.rows for cell in row[1:])),
    }


def _mean_gaps(each: Cells) -> tuple[float, float]:
    gaps = [fmean(cell.mean for cell in row) for row in each.improvements(LOSS)]
    return fmean(gaps[:2]), fmean(gaps[2:])


def _paper_row(each: Cells) -> dict[str, str]:
    gaps = [fmean(row[0] - cell for cell in row[1:]) for row in each.grid.loss]
    signs = {LOSS: -1, ACCURACY: 1}
    better = [
        sum(signs[measure] * (cell - row[0]) > 0 for row in each.paper(measure) for cell in row[1:])
        for measure in MEASURES
    ]
    total = sum(len(row) - 1 for row in each.grid.loss)
    return {
        "V_xx": "the paper",
        "curvature of": each.grid.label,
        "loss better": f"{better[0]} of {total}",
        "accuracy better": f"{better[1]} of {total}",
        "gap, smaller two rates": f"{fmean(gaps[:2]):.3f}",
        "gap, larger two rates": f"{fmean(gaps[2:]):.3f}",
        "distance": "0",
        "diverged": "",
    }
