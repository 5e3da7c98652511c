"""Fig. 4a and its absolute tables, and the same for Adam: what feedback changes over learning rates and eps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from ddpnopt.lab.paper.captions import verdict
from ddpnopt.lab.paper.digits_runs import (
    ACCURACY,
    LOSS,
    MEASURES,
    SETUP,
    Cells,
    cells,
    compared_seeds,
    digits_task,
)
from ddpnopt.lab.paper.fig_grid_drawing import draw
from ddpnopt.lab.paper.fig_grid_published import ADAM, GRIDS, Grid
from ddpnopt.lab.paper.fig_grid_tables import baselines, distance, readings_table, tables
from ddpnopt.lab.paper.item import Claim, Context, Item, Picture, Result
from ddpnopt.lab.paper.item_runs import how_run
from ddpnopt.lab.paper.readings import PAPER, READINGS, Reading
from ddpnopt.lab.paper.verdicts import Estimate, all_of


def run_grid(context: Context) -> Result:
    return _result(context, GRIDS, "grid")


def run_adam(context: Context) -> Result:
    return _result(context, (ADAM,), "adam")


def _result(context: Context, grids: Sequence[Grid], name: str) -> Result:
    found = cells(context, grids)
    compared = compared_seeds(context)
    by_reading = {each: cells(context, grids, each, compared) for each in READINGS.values()}
    claims = [claim for each in found for claim in (consistent(each), grows(each))]
    verdicts = "; ".join(f"{c.text[0].lower()}{c.text[1:]}: {verdict(c.holds)}" for c in claims)
    caption = (
        "What feedback changes on DIGITS, over learning rate and eps on V_xx: mean over seeds of the difference to the "
        "baseline with the same learning rate, weights and batches; blue is better. The paper: the improvement "
        f"remains consistent across most settings and becomes obvious as the learning rate increases. Here: {verdicts}."
    )
    picture = Picture(name, caption, draw(found, MEASURES), _series(found))
    first = found[0].rows[0][0]
    lost = sum(each.diverged for each in found)
    notes = [
        f"{how_run(context, digits_task(context), found[0].seeds)} {SETUP}",
        _chosen(by_reading),
        "A claim holds or fails where the mean over all cells differs from zero by more than two standard errors over "
        "the seeds; within them it is open.",
    ]
    if lost:
        notes.append(
            f"{lost} runs diverged; they count as guessing (accuracy 10 %, loss {first.task.untrained.loss:.2f})."
        )
    if name == "adam":
        notes.append("The paper shows this as a picture without numbers; learning rates and eps are those of RMSprop.")
    shown = [t for each in found for t in tables(each)]
    if any(each.grid.loss for each in found):
        shown.append(baselines(found))
    return Result(claims, [*shown, readings_table(by_reading)], [picture], notes)


def _chosen(found: Mapping[Reading, Sequence[Cells]]) -> str:
    """Which reading the claims are judged in, and whether the numbers here still support that choice."""
    text = f"DDPNOpt is value='full' in the reading '{PAPER}' ({READINGS[PAPER].label})"
    if not all(each.grid.loss for cells in found.values() for each in cells):
        return f"{text}, as in fig-grid."
    closest = min(found, key=lambda reading: fmean(distance(each) for each in found[reading]))
    if closest.name == PAPER:
        return f"{text}, whose training losses are the closest to the paper's of all readings compared."
    return f"{text}. In these runs '{closest.label}' is closer to the paper's training losses."


def consistent(each: Cells) -> Claim:
    """Better in more than half of the cells, and on the mean over all of them, in both measures."""
    ours, paper, verdicts = [], [], []
    for measure, digits in ((LOSS, 3), (ACCURACY, 2)):
        gains = [cell for row in each.gains(measure) for cell in row]
        better = sum(fmean(cell) > 0 for cell in gains)
        overall = Estimate.of(fmean(seed) for seed in zip(*gains, strict=True))
        most = better > len(gains) / 2
        verdicts.append(None if overall.positive is None else overall.positive == most and most)
        ours.append(
            f"{measure.partition(' (')[0]} better in {better} of {len(gains)} cells, "
            f"by {overall.text(digits)} on average"
        )
        rows = each.paper(measure)
        if rows:
            sign = -1 if measure == LOSS else 1
            better = sum(sign * (cell - row[0]) > 0 for row in rows for cell in row[1:])
            paper.append(f"{better} of {sum(len(row) - 1 for row in rows)}")
    holds = all_of(verdicts)
    return Claim(
        f"{each.grid.label}: feedback improves on the baseline in most settings",
        holds,
        "loss better in {}, accuracy in {}".format(*paper) if paper else "most (a picture)",
        ", ".join(ours),
        "" if holds else _why(holds, "The mean over the cells is within two standard errors of none."),
    )


def grows(each: Cells) -> Claim:
    """Compare the mean gap in training loss at the larger two learning rates with that at the smaller two."""
    gaps = [[fmean(seed) for seed in zip(*row, strict=True)] for row in each.gains(LOSS)]  # rates, seeds
    low, high = ([fmean(seed) for seed in zip(*part, strict=True)] for part in (gaps[:2], gaps[2:]))
    more = Estimate.of(b - a for a, b in zip(low, high, strict=True))
    text = "mean gap in training loss {:.3f} at the smaller two, {:.3f} at the larger two"
    paper = "a picture"
    if each.grid.loss:
        known = [fmean(row[0] - cell for cell in row[1:]) for row in each.grid.loss]
        paper = text.format(fmean(known[:2]), fmean(known[2:]))
    return Claim(
        f"{each.grid.label}: the gap becomes larger as the learning rate increases",
        more.positive,
        paper,
        f"{text.format(fmean(low), fmean(high))}, {more.text(3)} more",
        "" if more.positive else _why(more.positive, "The growth is within two standard errors of none."),
    )


def _why(holds: bool | None, within: str) -> str:
    return within if holds is None else "It is the other way round, by more than two standard errors."


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
