"""`fig-vanishing`: nine sigmoid layers, whose gradients vanish, and which method trains them nevertheless."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import mean

import pandas as pd

from ddpnopt.lab.paper.captions import caption, compact, spread
from ddpnopt.lab.paper.fig_vanishing_drawing import Panel, draw, draw_norms, norm_series, series
from ddpnopt.lab.paper.fig_vanishing_runs import OBJECTIVES, VanishingCase, VanishingEffort, VanishingRun, train
from ddpnopt.lab.paper.item import Claim, Context, Item, Picture, Result, Table

# The learning rates of the paper's Figure 6; its Figure 12 tries others around them.
RATES = {"SGD": 0.1, "SGD-VGR": 0.1, "EKFAC": 0.03, "DDPNOpt": 0.03, "DDPNOpt2nd": 0.03}
TUNED = ("SGD-VGR", "EKFAC", "DDPNOpt", "DDPNOpt2nd")
ADAPTIVE = ("Adam", "RMSprop", "DDPNOpt*")
ADAPTIVE_RATE = 0.003
"""Not in the paper; from the middle of its Table 5."""
FULL = VanishingEffort(epochs=14, lrs=(0.01, 0.03, 0.1, 0.3))
QUICK = VanishingEffort(epochs=2, lrs=(0.03, 0.1), n_train=200)
DECISIVE = 500
"""Steps without which nothing can be said: no method is off the plateau before some hundreds of them."""


@dataclass(frozen=True, eq=False)
class VanishingRuns:
    """All trainings, several seeds of each case."""

    of: dict[VanishingCase, list[VanishingRun]]

    def escapes(self, case: VanishingCase) -> int:
        return sum(each.escaped for each in self.of[case])

    def stuck(self, cases: Iterable[VanishingCase]) -> bool:
        return all(self.escapes(case) == 0 for case in cases)

    def free(self, cases: Iterable[VanishingCase]) -> bool:
        return all(self.escapes(case) == len(self.of[case]) for case in cases)

    def final(self, case: VanishingCase) -> float:
        return mean(each.final for each in self.of[case])

    def final_losses(self, cases: Iterable[VanishingCase]) -> str:
        """Method, learning rate and loss of the last epoch."""
        return ", ".join(
            f"{case.way} at {case.lr:g}: {spread([each.final for each in self.of[case]])}" for case in cases
        )

    @property
    def decisive(self) -> bool:
        return min(len(each.losses) for runs in self.of.values() for each in runs if not each.diverged) >= DECISIVE


def main_cases() -> list[VanishingCase]:
    return [VanishingCase(way, lr) for way, lr in RATES.items()]


def variants(**changes: str) -> list[VanishingCase]:
    """The main cases with another loss or activation."""
    return [replace(case, **changes) for case in main_cases()]  # type: ignore[arg-type]


def adaptive_cases() -> list[VanishingCase]:
    return [VanishingCase(way, ADAPTIVE_RATE) for way in ADAPTIVE]


def tuning_cases(lrs: Sequence[float], ways: Sequence[str] = TUNED) -> list[VanishingCase]:
    return [VanishingCase(way, lr) for lr in lrs for way in ways]


def run(context: Context) -> Result:
    effort = QUICK if context.quick else FULL
    seeds = context.seeds or 1
    wanted = [*main_cases(), *variants(objective="CE"), *variants(activation="ReLU"), *adaptive_cases()]
    wanted = list(dict.fromkeys([*wanted, *tuning_cases(effort.lrs)]))
    runs = VanishingRuns({case: [] for case in wanted})
    for number, case in enumerate(wanted):
        for seed in range(seeds):
            what = f"{case.way}, learning rate {case.lr:g}, {case.objective}, {case.activation}"
            context.on_progress(what, number * seeds + seed, len(wanted) * seeds)
            runs.of[case].append(train(case, seed, effort))
    context.on_progress("done", len(wanted) * seeds, len(wanted) * seeds)
    claims = judge(runs, effort)
    return Result(claims, tables(runs), pictures(runs, effort, claims), _notes(effort, seeds, context.quick))


def judge(runs: VanishingRuns, effort: VanishingEffort) -> list[Claim]:
    """What the paper says, in its order."""
    baselines = [VanishingCase("SGD-VGR", RATES["SGD-VGR"]), VanishingCase("EKFAC", RATES["EKFAC"])]
    mine = tuning_cases(effort.lrs, ("DDPNOpt", "DDPNOpt2nd"))
    theirs = tuning_cases(effort.lrs, ("SGD-VGR", "EKFAC"))
    first, second = VanishingCase("DDPNOpt", RATES["DDPNOpt"]), VanishingCase("DDPNOpt2nd", RATES["DDPNOpt2nd"])
    ratio = norm_ratio(runs, first, VanishingCase("EKFAC", RATES["EKFAC"]))
    ratio2 = norm_ratio(runs, second, VanishingCase("EKFAC", RATES["EKFAC"]))
    star, others = (
        VanishingCase("DDPNOpt*", ADAPTIVE_RATE),
        [VanishingCase(way, ADAPTIVE_RATE) for way in ("Adam", "RMSprop")],
    )
    claims = [
        Claim(
            "SGD-VGR and EKFAC make no progress on the sigmoid network with the MMC loss.",
            runs.stuck(baselines),
            "stuck",
            f"{runs.final_losses(baselines)} (plateau 50)",
        ),
        Claim(
            "DDPNOpt and DDPNOpt2nd escape from vanishing gradients with all tested learning rates.",
            runs.free(mine),
            "all escape",
            runs.final_losses(mine),
        ),
        Claim(
            "The training of SGD-VGR and EKFAC is the same, stuck, whatever the learning rate.",
            runs.stuck(theirs),
            "all stuck",
            runs.final_losses(theirs),
        ),
        Claim(
            "The effect becomes significant when the dynamics is expanded to second order.",
            runs.free([second]) and runs.final(second) < runs.final(first),
            "lower loss with second order",
            runs.final_losses([first, second]),
        ),
        Claim(
            "The update of DDPNOpt is typically 5 to 10 times larger.",
            ratio >= 5,
            "5 to 10 times",
            f"{compact(ratio)} times EKFAC's at the same learning rate, DDPNOpt2nd's {compact(ratio2)} times",
        ),
        Claim(
            "With cross-entropy none escapes.",
            runs.stuck(variants(objective="CE")),
            "all stuck",
            f"{runs.final_losses(variants(objective='CE'))} (plateau 2.30)",
        ),
        Claim(
            "With ReLU the gradients do not vanish.",
            runs.free(variants(activation="ReLU")),
            "all train",
            runs.final_losses(variants(activation="ReLU")),
        ),
        Claim(
            "DDPNOpt* (adaptive diagonal) converges faster than Adam and RMSprop.",
            runs.final(star) < min(runs.final(other) for other in others),
            "faster",
            runs.final_losses([star, *others]),
        ),
    ]
    return claims if runs.decisive else [replace(claim, holds=None) for claim in claims]


def norm_ratio(runs: VanishingRuns, case: VanishingCase, other: VanishingCase) -> float:
    """Of the mean norms of an update, over all layers and steps after the first epoch, where the plateau is reached."""

    def typical(each: VanishingCase) -> float:
        found = [run.norms[run.per_epoch :] for run in runs.of[each]]
        return mean(float(norms.mean()) if len(norms) else 0.0 for norms in found)

    return typical(case) / typical(other)


def tables(runs: VanishingRuns) -> list[Table]:
    rows = []
    for case, found in runs.of.items():
        early = [float(run.norms[: run.per_epoch, 0].mean()) if len(run.norms) else 0.0 for run in found]
        rows.append(
            {
                "loss": case.objective,
                "activation": case.activation,
                "method": case.way,
                "learning rate": f"{case.lr:g}",
                "plateau": f"{OBJECTIVES[case.objective].plateau:.2f}",
                "loss of the last epoch": spread([run.final for run in found]),
                "escaped": f"{runs.escapes(case)} of {len(found)}",
                "test accuracy (%)": spread([run.accuracy for run in found], 1),
                "update of the first layer, first epoch": compact(mean(early)),
            }
        )
    layers = []
    for case in main_cases():
        norms = [run.norms[run.per_epoch :].mean(0) for run in runs.of[case]]
        typical = sum(norms) / len(norms)
        layers.append(
            {"method": case.way, "learning rate": f"{case.lr:g}"}
            | {f"layer {number}": compact(float(value)) for number, value in enumerate(typical, start=1)}
        )
    return [
        Table("vanishing", "Nine layers on DIGITS: every method, loss and activation.", pd.DataFrame(rows)),
        Table(
            "update-norms",
            "Mean norm of an update, layer by layer, after the first epoch (MMC, sigmoid).",
            pd.DataFrame(layers),
        ),
    ]


def pictures(runs: VanishingRuns, effort: VanishingEffort, claims: Sequence[Claim]) -> list[Picture]:
    main = [Panel("Sigmoid, MMC", "MMC", main_cases())]
    other = [
        Panel("Sigmoid, cross-entropy", "CE", variants(objective="CE")),
        Panel("ReLU, MMC", "MMC", variants(activation="ReLU")),
        Panel("Sigmoid, MMC, adaptive methods", "MMC", adaptive_cases()),
    ]
    rates = [Panel(f"Learning rate {lr:g}", "MMC", tuning_cases([lr])) for lr in effort.lrs]
    made = []
    about: list[tuple[str, str, list[Panel], str, Sequence[Claim]]] = [
        ("vanishing-variants", "Other losses, activations and methods", other, "Dashed: the plateau.", claims[5:8]),
        ("vanishing-rates", "Sigmoid, MMC: learning rates", rates, "Dashed: the plateau.", claims[1:3]),
    ]
    text = (
        "Left: loss of the batches, averaged over an epoch; dashed, the plateau. Right: mean norm of an update after "
        "the first epoch, layer by layer."
    )
    words = caption(text, [claims[0], *claims[3:5]])
    figure = draw_norms(main[0], runs.of, words)
    made.append(Picture("vanishing", words, figure, [*series(main, runs.of), *norm_series(main[0], runs.of)]))
    for name, title, panels, seen, decided in about:
        words = caption(seen, decided)
        made.append(Picture(name, words, draw(title, panels, runs.of, words), series(panels, runs.of)))
    return made


def _notes(effort: VanishingEffort, seeds: int, quick: bool) -> list[str]:
    notes = [
        f"Nine layers of width 20, batches of {effort.batch_size}, {effort.epochs} epochs, {seeds} seed(s); the paper "
        "gives neither epochs nor batch size nor seeds. A training has escaped when the mean loss of its last epoch is "
        "below 90 % of the plateau.",
        "DDPNOpt has the Kronecker curvature here and DDPNOpt* the adaptive diagonal, as in the paper's captions; "
        "EKFAC and DDPNOpt share a damping of 0.03, which keeps EKFAC on the plateau at small learning rates: with a "
        "damping of 0.001 EKFAC leaves it at once.",
        f"Adam, RMSprop and DDPNOpt* at {ADAPTIVE_RATE:g}; the paper does not say its rate.",
    ]
    if quick:
        notes.append(f"Quick: {effort.n_train} training samples and too few steps to decide any claim.")
    return notes


ITEM = Item(
    "fig-vanishing",
    "Vanishing gradients: nine sigmoid layers",
    "Figure 6, section 5.2; Figures 10 to 12, appendix",
    run,
)
