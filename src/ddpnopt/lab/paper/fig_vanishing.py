"""`fig-vanishing`: nine sigmoid layers, whose gradients vanish, and which method trains them nevertheless."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from ddpnopt.lab.paper.captions import caption, compact, spread
from ddpnopt.lab.paper.fig_vanishing_claims import (
    ADAPTIVE,
    ADAPTIVE_RATE,
    adaptive_cases,
    judge,
    main_cases,
    readings_table,
    tuning_cases,
    variants,
    weight_cases,
)
from ddpnopt.lab.paper.fig_vanishing_drawing import Panel, draw, draw_norms, norm_series, series, typical_norms
from ddpnopt.lab.paper.fig_vanishing_relu import LOWERED, best_rate, listed, relu_cases
from ddpnopt.lab.paper.fig_vanishing_runs import (
    JUDGED,
    PLATEAUS,
    RATES,
    VGR_WEIGHT,
    VanishingCase,
    VanishingEffort,
    VanishingRuns,
    trained,
)
from ddpnopt.lab.paper.item import Claim, Context, Item, Picture, Result, Table
from ddpnopt.lab.paper.item_runs import seeds_of
from ddpnopt.lab.paper.readings import READINGS, Reading

FULL = VanishingEffort(epochs=40, lrs=(0.01, 0.03, 0.1, 0.3), lower=(0.0003, 0.001, 0.003))
QUICK = VanishingEffort(epochs=2, lrs=(0.03, 0.1), n_train=200)
SEEDS, QUICK_SEEDS = 3, 1
ADAPTIVE_SEEDS = 10
"""Of the adaptive methods, of which the paper says which is faster: they differ by less than a few seeds can show."""
DECISIVE = 500
"""Steps without which nothing can be said: no method is off the plateau before some hundreds of them."""


def reading_cases(context: Context) -> list[VanishingCase]:
    """The other readings of V_xx; with second order the guard takes too long, and only those without it are there."""
    others = [each.name for each in context.compared if each != context.judged]
    unguarded = [name for name in others if READINGS[name].options.get("guard") is False]
    first = [VanishingCase("DDPNOpt", RATES["DDPNOpt"], reading=name) for name in others]
    return [*first, *(VanishingCase("DDPNOpt2nd", RATES["DDPNOpt2nd"], reading=name) for name in unguarded)]


def run(context: Context) -> Result:
    if not context.readings:
        context = replace(context, readings=(JUDGED, *(name for name in READINGS if name != JUDGED)))
    effort = QUICK if context.quick else FULL
    seeds, more = seeds_of(context, SEEDS, QUICK_SEEDS), seeds_of(context, ADAPTIVE_SEEDS, QUICK_SEEDS)
    wanted = [*main_cases(), *variants(objective="CE"), *relu_cases(effort), *adaptive_cases()]
    wanted += [*tuning_cases(effort.lrs), *reading_cases(context), *weight_cases("MMC"), *weight_cases("CE")]
    plan = {case: more if case.way in ADAPTIVE else seeds for case in wanted}
    runs = VanishingRuns(trained(context, plan, effort))
    claims = judge(runs, effort)
    if effort.steps < DECISIVE:
        claims = [replace(claim, holds=None, why="") for claim in claims]
    notes = _notes(effort, len(seeds), len(more), context)
    return Result(claims, tables(runs, context.judged), pictures(runs, effort, claims), notes)


def tables(runs: VanishingRuns, judged: Reading) -> list[Table]:
    rows = [
        {
            "loss": case.objective,
            "activation": case.activation,
            "method": case.way,
            "learning rate": f"{case.lr:g}",
            "V_xx": (READINGS[case.reading] if case.reading else judged).label if "DDPNOpt" in case.way else "",
            "penalty": f"{case.weight:g}" if case.way == "SGD-VGR" else "",
            "plateau": f"{PLATEAUS[case.objective]:.2f}",
            "training loss": spread([run.final for run in found]),
            "escaped": f"{runs.escapes(case)} of {len(found)}",
            "test accuracy (%)": spread([run.accuracy for run in found], 1),
        }
        for case, found in runs.of.items()
    ]
    layers = []
    for case in main_cases():
        norms = typical_norms(runs.of[case])
        numbers = norms if len(norms) else np.full(9, np.nan)
        layers.append(
            {"method": case.way, "learning rate": f"{case.lr:g}"}
            | {f"layer {number}": compact(float(value)) for number, value in enumerate(numbers, start=1)}
        )
    return [
        Table("vanishing", "Nine layers on DIGITS: every method, loss, activation and reading.", pd.DataFrame(rows)),
        Table(
            "update-norms",
            "Mean norm of an update, layer by layer, after the first epoch (MMC, sigmoid).",
            pd.DataFrame(layers),
        ),
        readings_table(runs, judged),
    ]


def pictures(runs: VanishingRuns, effort: VanishingEffort, claims: Sequence[Claim]) -> list[Picture]:
    main = [Panel("Sigmoid, MMC", "MMC", main_cases())]
    other = [
        Panel("Sigmoid, cross-entropy", "CE", variants(objective="CE")),
        Panel("ReLU, MMC, best learning rates", "MMC", [best_rate(runs, way, effort) for way in RATES]),
        Panel("Sigmoid, MMC, adaptive methods", "MMC", adaptive_cases()),
    ]
    rates = [Panel(f"Learning rate {lr:g}", "MMC", tuning_cases([lr])) for lr in effort.lrs]
    made = []
    about: list[tuple[str, str, list[Panel], str, Sequence[Claim]]] = [
        ("vanishing-variants", "Other losses, activations and methods", other, "Dashed: the plateau.", claims[5:8]),
        ("vanishing-rates", "Sigmoid, MMC: learning rates", rates, "Dashed: the plateau.", claims[1:3]),
    ]
    text = (
        "Left: loss of the batches; dashed, the plateau. Right: mean norm of an update after the first epoch, layer by "
        "layer."
    )
    words = caption(text, [claims[0], *claims[3:5]])
    figure = draw_norms(main[0], runs.of, words)
    made.append(Picture("vanishing", words, figure, [*series(main, runs.of), *norm_series(main[0], runs.of)]))
    for name, title, panels, seen, decided in about:
        words = caption(seen, decided)
        made.append(Picture(name, words, draw(title, panels, runs.of, words), series(panels, runs.of)))
    return made


def _notes(effort: VanishingEffort, seeds: int, more: int, context: Context) -> list[str]:
    notes = [
        f"Nine layers of width 32, batches of {effort.batch_size}, {effort.epochs} epochs, {seeds} seed(s); the paper "
        "gives neither epochs nor batch size nor seeds. A training has escaped when its training loss at the end is "
        "below 90 % of the plateau.",
        f"DDPNOpt is in the reading '{context.judged.label}': the guard of fig-grid takes too long with second "
        "order. It multiplies V_x by 1 / (1 + s), which adds to the vanishing; without it 1 - s amplifies V_x where "
        "s > 2. The table of readings has them side by side.",
        "DDPNOpt has the Kronecker curvature here and DDPNOpt* the adaptive diagonal, as in the paper's captions; "
        "EKFAC and DDPNOpt have damping 0.1 and refresh every 100 steps.",
        "The ReLU network is judged at the best of the learning rates with which Figure 12 is repeated: the paper does "
        "not give those of its ReLU panel. Before, the rates of the sigmoid network counted, of which the paper says "
        "nothing for ReLU; this was changed when SGD was known to train at 0.01, before the others were run there.",
        *([_lowered(effort)] if effort.lower else []),
        f"SGD-VGR has the weight {VGR_WEIGHT:g} of Pascanu et al.; the paper gives none, and the table shows others.",
        f"Adam, RMSprop and DDPNOpt* at {ADAPTIVE_RATE:g}, {more} seed(s); the paper does not say its rate.",
    ]
    if context.quick:
        notes.append(f"Quick: {effort.n_train} training samples and too few steps to decide any claim.")
    return notes


def _lowered(effort: VanishingEffort) -> str:
    return (
        f"{' and '.join(LOWERED)}, of which some run diverges on the ReLU network at each of these rates, have the "
        f"lower rates {listed(effort.lower)} there, too; the others train at 0.01."
    )


ITEM = Item(
    "fig-vanishing",
    "Vanishing gradients: nine sigmoid layers",
    "Figure 6, section 5.2; Figures 10 to 12, appendix",
    run,
    stored=True,
)
