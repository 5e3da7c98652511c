"""What the paper says about the ReLU network of `fig-vanishing`, at the best learning rate of each method."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from ddpnopt.lab.paper.fig_vanishing_runs import RATES, VanishingCase, VanishingEffort, VanishingRuns
from ddpnopt.lab.paper.item import Claim

LOWERED = ("EKFAC", "DDPNOpt2nd")
"""Of which at each rate of Figure 12 some run diverges: they have lower rates, too."""


def relu_rates(way: str, effort: VanishingEffort) -> tuple[float, ...]:
    """The learning rates that a method is tried with on the ReLU network."""
    return (*effort.lower, *effort.lrs) if way in LOWERED else effort.lrs


def relu_cases(effort: VanishingEffort, ways: Sequence[str] = tuple(RATES)) -> list[VanishingCase]:
    return [VanishingCase(way, lr, activation="ReLU") for way in ways for lr in relu_rates(way, effort)]


def relu_claim(runs: VanishingRuns, effort: VanishingEffort) -> Claim:
    """Judged at the best of the learning rates: the paper gives none for ReLU, and those of Figure 6 suit sigmoids.

    It fails where a method stays on the plateau at all of them. A run that diverged has not vanished: where there is
    nothing else the claim is open. So it is for SGD-VGR alone: without its penalty, of unknown weight, it is SGD.
    """
    best = [best_rate(runs, way, effort) for way in RATES]
    left = [case for case in best if not runs.free([case])]
    stuck = [case for case in left if case.way != "SGD-VGR" and _stays(runs, relu_cases(effort, [case.way]))]
    holds = False if stuck else None if left else True
    rates = listed(effort.lrs)
    if effort.lower:
        rates += f" ({' and '.join(LOWERED)} also of {listed(effort.lower)})"
    away = relu_cases(effort, [case.way for case in left])
    lost = [each.diverged for case in away for each in runs.of[case]]
    what = "On the plateau at every rate" if stuck else "At no rate on every seed"
    why = (
        f"{what}: {', '.join(case.way for case in stuck or left)}; {sum(lost)} of {len(lost)} "
        f"runs of {', '.join(case.way for case in left)} diverged. The paper does not give its rates."
        f"{'' if stuck else ' Rates at which they are stable would decide it.'}"
    )
    return Claim(
        "With ReLU the gradients do not vanish.",
        holds,
        "all train",
        f"at the best rate of {rates}: {runs.final_losses(best)} (plateau 50); escaped: {runs.escaping(best)}",
        "" if holds else why,
    )


def listed(rates: Sequence[float]) -> str:
    """As text."""
    *most, last = (f"{lr:g}" for lr in rates)
    return f"{', '.join(most)} and {last}" if most else last


def best_rate(runs: VanishingRuns, way: str, effort: VanishingEffort) -> VanishingCase:
    """Of a method on the ReLU network: where it leaves the plateau on most seeds, then with the lowest mean loss."""

    def order(case: VanishingCase) -> tuple[int, float]:
        ended = [final for final in runs.finals(case) if math.isfinite(final)]
        return -runs.escapes(case), fmean(ended) if ended else math.inf

    return min(relu_cases(effort, [way]), key=order)


def _stays(runs: VanishingRuns, cases: Sequence[VanishingCase]) -> bool:
    """Whether no run leaves the plateau, and some of them did not diverge."""
    return runs.stuck(cases) and not all(each.diverged for case in cases for each in runs.of[case])
