"""Fig. 4b: the training loss of baseline and DDPNOpt at settings of `fig-grid`, whose runs it uses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray

from ddpnopt.lab import style
from ddpnopt.lab.paper.captions import verdict
from ddpnopt.lab.paper.digits_runs import BATCH_SIZE, SEEDS, SETUP, compared_seeds, config, digits_task
from ddpnopt.lab.paper.fig_grid_published import EKFAC, RMSPROP, SGD, Grid
from ddpnopt.lab.paper.item import Claim, Context, Item, Picture, Result, Table
from ddpnopt.lab.paper.item_runs import SeedRuns, how_run, outcomes, seeds_of
from ddpnopt.lab.paper.readings import Reading
from ddpnopt.lab.paper.verdicts import USUAL_SEEDS, Estimate, difference, held_elsewhere, jackknife, open_because, rule

# The second learning rate of each grid, with the eps that is best there in the paper's table.
EXAMPLES: Sequence[tuple[Grid, float, float]] = ((SGD, 0.6, 1e-3), (RMSPROP, 0.02, 5e-6), (EKFAC, 0.09, 1e-7))
MOST_SEEDS = {SGD: USUAL_SEEDS, EKFAC: USUAL_SEEDS}
"""More are not run: so many decide the claims of these two, but for EKFAC's variance, which would take hundreds."""


@dataclass(frozen=True)
class Example:
    """One setting: the curves of all seeds of both methods."""

    grid: Grid
    lr: float
    eps: float
    base: SeedRuns
    ours: SeedRuns


def examples_of(context: Context, reading: Reading, seeds: range) -> list[Example]:
    """The settings of the figure in one reading; the runs are those of `fig-grid`."""
    chosen = {grid: seeds[: MOST_SEEDS.get(grid)] for grid, _, _ in EXAMPLES}
    wanted = [
        config(context, method, lr, seed, eps if method == grid.ours else 0.0, reading)
        for grid, lr, eps in EXAMPLES
        for method in (grid.base, grid.ours)
        for seed in chosen[grid]
    ]
    found = iter(outcomes(context, wanted, "DIGITS"))
    task = digits_task(context)
    return [
        Example(grid, lr, eps, *(SeedRuns([next(found) for _ in chosen[grid]], task) for _ in range(2)))
        for grid, lr, eps in EXAMPLES
    ]


def run(context: Context) -> Result:
    seeds = seeds_of(context, SEEDS)
    judged = context.judged
    examples = examples_of(context, judged, seeds)
    compared = {each: examples_of(context, each, compared_seeds(context)) for each in context.compared}
    others = [(each, _by_text(parts)) for each, parts in compared.items() if each != judged]
    claims = [
        replace(claim, why=f"{claim.why} {held_elsewhere(claim, others)}".strip()) if claim.holds is not True else claim
        for each in examples
        for claim in claims_of(each)
    ]
    held = sum(bool(claim.holds) for claim in claims)
    caption = (
        "Training loss on DIGITS over the steps: mean over seeds, band of one standard deviation. The paper: feedback "
        f"can lead to smaller variance and faster convergence. Here {held} of {len(claims)} such statements hold."
    )
    table = pd.DataFrame([_row(each, name) for each in examples for name in (each.grid.base, each.grid.ours)])
    notes = [
        f"{how_run(context, digits_task(context), len(seeds))} {SETUP} The runs are those of fig-grid.{_fewer(seeds)}",
        f"DDPNOpt in the reading '{judged.label}', see fig-grid. Errors: the differences seed by seed; for the "
        f"variance, leaving out one seed after the other. A claim is decided beyond {rule(len(seeds))}; else it is "
        "open.",
        "The paper does not say which settings it shows: these are the second learning rate of each grid, with the eps "
        "that is best there in the paper's table.",
    ]
    return Result(
        claims,
        [Table("dynamics", "The runs of the figure at their end.", table), _compared(compared)],
        [Picture("dynamics", caption, _draw(examples), _series(examples))],
        notes,
    )


def _fewer(seeds: range) -> str:
    """Which examples have fewer seeds than asked for."""
    found = [f"{grid.label} {most}" for grid, most in MOST_SEEDS.items() if most < len(seeds)]
    return f" At most so many of them: {', '.join(found)}." if found else ""


def _curves(seeds: SeedRuns) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Steps (T,) and losses (seeds, T) of the runs that did not diverge."""
    whole = [run.curve for run in seeds.runs if not run.diverged]
    if not whole:
        return np.array([]), np.empty((0, 0))
    return np.array(whole[0].steps, dtype=np.float64), np.array([curve.losses for curve in whole])


def claims_of(each: Example) -> list[Claim]:
    label = each.grid.label
    steadier, faster = f"{label}: smaller variance over the seeds", f"{label}: faster convergence"
    # a seed left out of one of them only would be compared with another seed
    lost = each.base.diverged + each.ours.diverged
    if lost or len(each.base.runs) < 2:
        few = f"{lost} runs diverged" if lost else "one seed"
        return [Claim(text, None, "a picture", few, "Too few runs.") for text in (steadier, faster)]
    (_, base), (_, ours) = _curves(each.base), _curves(each.ours)
    spread = [float(c.std(0, ddof=1).mean()) for c in (base, ours)]
    ratio = spread_ratio(base, ours)
    sooner = difference(base.mean(1).tolist(), ours.mean(1).tolist())
    return [
        Claim(
            steadier,
            ratio.positive,
            "a picture",
            f"standard deviation over the run {spread[1]:.3f}, without feedback {spread[0]:.3f} (logarithm of the "
            f"ratio {ratio.text(2)})",
            _why(ratio),
        ),
        Claim(
            faster,
            sooner.positive,
            "a picture",
            f"mean training loss over the run {ours.mean():.3f}, without feedback {base.mean():.3f}, lower by "
            f"{sooner.text(3)}",
            _why(sooner),
        ),
    ]


def spread_ratio(base: NDArray[np.float64], ours: NDArray[np.float64]) -> Estimate:
    """Logarithm of the baseline's standard deviation over the seeds, averaged over the run, over that of DDPNOpt."""

    def statistic(chosen: Sequence[int]) -> float:
        if len(chosen) < 2:
            return math.nan
        first, second = (float(c[list(chosen)].std(0, ddof=1).mean()) for c in (base, ours))
        return math.log(first / second)

    return jackknife(statistic, len(base))


def _why(found: Estimate) -> str:
    if found.positive is None:
        return open_because("The difference", found)
    return "" if found.positive else "It is the other way round, beyond the margin of error."


def _by_text(examples: Sequence[Example]) -> dict[str, bool | None]:
    return {claim.text: claim.holds for each in examples for claim in claims_of(each)}


def _compared(found: Mapping[Reading, Sequence[Example]]) -> Table:
    rows = []
    for reading, examples in found.items():
        for each in examples:
            (_, base), (_, ours) = _curves(each.base), _curves(each.ours)
            steadier, faster = (verdict(claim.holds) for claim in claims_of(each))
            rows.append(
                {
                    "V_xx": reading.label,
                    "curvature of": each.grid.label,
                    "mean training loss": _mean(ours),
                    "without feedback": _mean(base),
                    "standard deviation": _deviation(ours),
                    "without": _deviation(base),
                    "smaller variance": steadier,
                    "faster": faster,
                    "diverged": str(each.ours.diverged),
                }
            )
    seeds = len(next(iter(found.values()))[0].base.runs)
    caption = f"The readings of V_xx side by side, {seeds} seed{'s' if seeds > 1 else ''}."
    return Table("readings", caption, pd.DataFrame(rows))


def _mean(curves: NDArray[np.float64]) -> str:
    return f"{curves.mean():.3f}" if len(curves) else "-"


def _deviation(curves: NDArray[np.float64]) -> str:
    return f"{curves.std(0, ddof=1).mean():.3f}" if len(curves) > 1 else "-"


def _row(each: Example, name: str) -> dict[str, str]:
    ours = name == each.grid.ours
    seeds = each.ours if ours else each.base
    return {
        "method": f"DDPNOpt ({each.grid.label})" if ours else each.grid.label,
        "learning rate": f"{each.lr:g}",
        "eps": f"{each.eps:g}" if ours else "",
        "seeds": str(len(seeds.runs)),
        "training loss": seeds.loss.text(4),
        "accuracy (%)": seeds.accuracy.text(2),
        "diverged": str(seeds.diverged),
    }


def _draw(examples: Sequence[Example]) -> Figure:
    with style.style():
        made, axes = style.figure(len(examples), width=4.2, height=3.1)
        for panel, each in zip(axes, examples, strict=True):
            for seeds, name, label in (
                (each.base, each.grid.base, each.grid.label),
                (each.ours, each.grid.ours, f"DDPNOpt, eps {each.eps:g}"),
            ):
                steps, losses = _curves(seeds)
                if not len(losses):
                    continue
                mean = losses.mean(0)
                std = losses.std(0, ddof=1) if len(losses) > 1 else np.zeros_like(mean)
                colour = style.colour(name)
                panel.fill_between(steps, mean - std, mean + std, color=colour, alpha=0.15, linewidth=0)
                panel.plot(steps, mean, color=colour, label=label)
            panel.set(xlabel=f"step (batch size {BATCH_SIZE})", title=f"{each.grid.label}, learning rate {each.lr:g}")
            panel.set_ylim(bottom=0)
            panel.legend()
        axes[0].set_ylabel("training loss")
        return made


def _series(examples: Sequence[Example]) -> list[dict[str, object]]:
    made = []
    for each in examples:
        for seeds, label in ((each.base, each.grid.label), (each.ours, f"DDPNOpt, eps {each.eps:g}")):
            steps, losses = _curves(seeds)
            if len(losses):
                made.append(
                    {
                        "panel": f"{each.grid.label}, learning rate {each.lr:g}",
                        "label": label,
                        "x": steps.tolist(),
                        "y": losses.mean(0).tolist(),
                        "spread": losses.std(0).tolist(),
                    }
                )
    return made


ITEM = Item("fig-dynamics", "Training with and without feedback", "Fig. 4b", run, stored=True)
