"""The tables of `fig-grid`: absolute values, the baselines' distance to the paper's, and the readings side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

import pandas as pd

from ddpnopt.lab.paper.captions import verdict
from ddpnopt.lab.paper.digits_runs import ACCURACY, LOSS, MEASURES, Cells
from ddpnopt.lab.paper.fig_grid_claims import CLOSE, ByReading, claims_of, tally
from ddpnopt.lab.paper.item import Table
from ddpnopt.lab.paper.readings import Reading
from ddpnopt.lab.tables import Spread


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
    heading = f"within {100 * CLOSE:.0f} %"
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
                    heading: "yes" if abs(away) <= CLOSE else "within two errors"
                    if abs(loss.mean - known) <= 2 * error else "no",
                    "accuracy (%)": accuracy.text(2),
                    "paper's accuracy": f"{each.grid.accuracy[i][0]:.2f}",
                }
            )  # fmt: skip
    caption = (
        "The baselines' own columns and their distance to the paper's: the set-up was chosen on the columns of SGD and "
        "RMSprop alone."
    )
    off = [f"{row['baseline']} at {row['learning rate']}" for row in rows if row[heading] == "no"]
    if off:
        caption += f" Farther away: {', '.join(off)}."
    if any(each.startswith("EKFAC") for each in off):
        caption += " The paper gives neither damping nor refresh of EKFAC: the next table has its column at others."
    return Table("baselines", caption, pd.DataFrame(rows))


def distance(each: Cells, *, feedback: bool = True) -> float:
    """Mean absolute logarithm of training loss over the paper's, over the cells of DDPNOpt.

    Without `feedback` the baseline stands for all cells of its rate: what a reading has to be better than.
    """
    ratios = [
        math.log(fmean(cell if feedback else row[0]) / known)
        for row, paper in zip(each.values(LOSS), each.grid.loss, strict=True)
        for cell, known in zip(row[1:], paper[1:], strict=True)
    ]
    return fmean(abs(ratio) for ratio in ratios)


def readings_table(found: ByReading, judged: Reading) -> Table:
    """For each reading and curvature: cells that are better, gaps, the distance to the paper's numbers, verdicts."""
    first = next(iter(found.values()))
    rows = [_reading_row(reading.label, each) for reading, parts in found.items() for each in parts]
    rows += [row for each in first if each.grid.loss for row in (_without_row(each), _paper_row(each))]
    seeds = first[0].seeds
    caption = f"The readings of V_xx side by side, seeds 0 to {seeds - 1}: " if seeds > 1 else "The readings, seed 0: "
    words = []
    for reading, parts in found.items():
        claims = tally([claim for each in parts for claim in claims_of(each)])
        fits = all(each.grid.loss for each in parts)
        far = f"distance {fmean(distance(each) for each in parts):.2f}, " if fits else ""
        words.append(f"{reading.label}: {far}{claims}")
    caption += "; ".join(words) + "."
    if all(each.grid.loss for each in first):
        none = fmean(distance(each, feedback=False) for each in first)
        caption += (
            f" Without any feedback the distance is {none:.2f}. Distance: mean absolute logarithm of DDPNOpt's "
            "training losses over the paper's."
        )
    return Table("readings", f"{caption} The tables above have the reading '{judged.label}'.", pd.DataFrame(rows))


def _reading_row(label: str, each: Cells) -> dict[str, str]:
    better = [sum(cell.mean > 0 for row in each.improvements(measure) for cell in row) for measure in MEASURES]
    total = sum(len(row) - 1 for row in each.rows)
    gaps = _mean_gaps(each)
    improves, grows = (verdict(claim.holds) for claim in claims_of(each))
    return {
        "V_xx": label,
        "curvature of": each.grid.label,
        "loss better": f"{better[0]} of {total}",
        "accuracy better": f"{better[1]} of {total}",
        "gap, smaller two rates": f"{gaps[0]:.3f}",
        "gap, larger two rates": f"{gaps[1]:.3f}",
        "distance": f"{distance(each):.2f}" if each.grid.loss else "",
        "improves": improves,
        "grows": grows,
        "diverged": str(sum(cell.diverged for row in each.rows for cell in row[1:])),
    }


def _without_row(each: Cells) -> dict[str, str]:
    return {
        "V_xx": "no feedback",
        "curvature of": each.grid.label,
        "loss better": "",
        "accuracy better": "",
        "gap, smaller two rates": "0.000",
        "gap, larger two rates": "0.000",
        "distance": f"{distance(each, feedback=False):.2f}",
        "improves": "",
        "grows": "",
        "diverged": str(sum(row[0].diverged for row in each.rows)),
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
        "improves": "",
        "grows": "",
        "diverged": "",
    }
