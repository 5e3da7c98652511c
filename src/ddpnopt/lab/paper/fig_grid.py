"""Fig. 4a and its absolute tables, and the same for Adam: what feedback changes over learning rates and eps."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from ddpnopt.lab.paper.captions import verdict
from ddpnopt.lab.paper.digits_runs import (
    MEASURES,
    SETUP,
    Cells,
    cells,
    compared_seeds,
    digits_task,
)
from ddpnopt.lab.paper.fig_grid_claims import ByReading, claims_of, explained, tally
from ddpnopt.lab.paper.fig_grid_drawing import draw
from ddpnopt.lab.paper.fig_grid_ekfac import ekfac_settings
from ddpnopt.lab.paper.fig_grid_published import ADAM, EKFAC, GRIDS, RMSPROP, SGD, Grid
from ddpnopt.lab.paper.fig_grid_tables import baselines, distance, readings_table, tables
from ddpnopt.lab.paper.item import Context, Item, Picture, Result
from ddpnopt.lab.paper.item_runs import how_run
from ddpnopt.lab.paper.readings import Reading
from ddpnopt.lab.paper.verdicts import USUAL_SEEDS, rule

MOST_SEEDS = {SGD: USUAL_SEEDS, RMSPROP: USUAL_SEEDS}
"""More are not run: so many decide SGD's claims, and for the growth of RMSprop's gap it would take hundreds."""


def run_grid(context: Context) -> Result:
    return _result(context, GRIDS, "grid")


def run_adam(context: Context) -> Result:
    return _result(context, (ADAM,), "adam")


def _result(context: Context, grids: Sequence[Grid], name: str) -> Result:
    found = cells(context, grids, most=MOST_SEEDS)
    compared = compared_seeds(context)
    by_reading = {each: cells(context, grids, each, compared) for each in context.compared}
    claims = [
        claim
        for i, each in enumerate(found)
        for claim in explained(each, context.judged, [(reading, parts[i]) for reading, parts in by_reading.items()])
    ]
    verdicts = "; ".join(f"{c.text}: {verdict(c.holds)}" for c in claims)
    caption = (
        "What feedback changes on DIGITS, over learning rate and eps on V_xx: mean over seeds of the difference to the "
        "baseline with the same learning rate, weights and batches; blue is better. The paper: the improvement "
        f"remains consistent across most settings and becomes obvious as the learning rate increases. Here: {verdicts}."
    )
    picture = Picture(name, caption, draw(found, MEASURES), _series(found))
    first = found[0].rows[0][0]
    lost = sum(each.diverged for each in found)
    seeds = max(each.seeds for each in found)
    notes = [
        f"{how_run(context, digits_task(context), seeds)} {SETUP}{_fewer(found, seeds)}",
        *_chosen(context.judged, by_reading),
        f"A claim holds or fails where the mean over all cells differs from zero by more than {rule(seeds)}; "
        "within it it is open.",
    ]
    if lost:
        notes.append(
            f"{lost} runs diverged; they count as guessing (accuracy 10 %, loss {first.task.untrained.loss:.2f}), and "
            "where it is the baseline, as no gain."
        )
    if name == "adam":
        notes.append("The paper shows this as a picture without numbers; learning rates and eps are those of RMSprop.")
    shown = [t for each in found for t in tables(each)]
    if any(each.grid.loss for each in found):
        shown.append(baselines(found))
    if EKFAC in grids:
        shown.append(ekfac_settings(context, compared))
    return Result(claims, [*shown, readings_table(by_reading, context.judged)], [picture], notes)


def _fewer(found: Sequence[Cells], seeds: int) -> str:
    """Which grids have fewer seeds than asked for."""
    fewer = [f"{each.grid.label} {each.seeds}" for each in found if each.seeds < seeds]
    return f" At most so many of them: {', '.join(fewer)}." if fewer else ""


def _chosen(judged: Reading, found: ByReading) -> list[str]:
    """Which reading the claims are judged in, which has the paper's sizes, and which its claims."""
    text = f"DDPNOpt is value='full' in the reading '{judged.name}' ({judged.label})"
    held = {reading: [claim for each in parts for claim in claims_of(each)] for reading, parts in found.items()}
    most = max(sum(bool(claim.holds) for claim in claims) for claims in held.values())
    best = [reading for reading, claims in held.items() if sum(bool(claim.holds) for claim in claims) == most]
    if not most:
        best = []
    names = " and ".join(f"'{each.name}' ({each.label}: {tally(held[each])})" for each in best)
    claims = (
        "On the seeds on which the readings are compared, too few to decide them, the claims hold in none."
        if not best
        else (
            f"Most of the paper's claims hold in the reading {names}, on the seeds on which the readings are compared; "
            "that is a choice by outcome, shown and not judged by. `--readings` judges in another one."
        )
    )
    if not all(each.grid.loss for parts in found.values() for each in parts):
        return [f"{text}, as in fig-grid.", claims]
    far = {reading: fmean(distance(each) for each in parts) for reading, parts in found.items()}
    closest = min(far, key=lambda reading: far[reading])
    apart = ", ".join(
        f"{each.grid.label} {distance(each):.2f} ({distance(each, feedback=False):.2f})" for each in found[judged]
    )
    fit = (
        "whose training losses are the closest to the paper's"
        if closest == judged
        else f"although the training losses of '{closest.label}' are closer to the paper's"
    )
    return [
        f"{text}, {fit}: of the readings compared, over all three curvatures. Its distance, and in brackets that of no "
        f"feedback at all: {apart}. Where the latter is not larger, the fit cannot tell readings apart.",
        claims,
    ]


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
