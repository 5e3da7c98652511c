"""What the paper says about vanishing gradients, and whether the trainings of `fig-vanishing` bear it out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import pandas as pd

from ddpnopt.lab.paper.captions import compact, spread
from ddpnopt.lab.paper.fig_vanishing_relu import relu_claim
from ddpnopt.lab.paper.fig_vanishing_runs import RATES, VGR_WEIGHT, VanishingCase, VanishingEffort, VanishingRuns
from ddpnopt.lab.paper.item import Claim, Table
from ddpnopt.lab.paper.readings import READINGS, Reading
from ddpnopt.lab.paper.verdicts import FEWEST_SEEDS, Estimate, all_of, difference, joint_seeds, would_decide

TUNED = ("SGD-VGR", "EKFAC", "DDPNOpt", "DDPNOpt2nd")
ADAPTIVE = ("Adam", "RMSprop", "DDPNOpt*")
ADAPTIVE_RATE = 0.003
"""Not in the paper; from the middle of its Table 5."""
VGR_WEIGHTS = (0.01, 0.1, 0.5)
"""Of SGD-VGR's penalty, beside its own: to see what depends on it."""
LARGER = (5.0, 10.0)
"""How many times as large the paper's updates are."""


def main_cases() -> list[VanishingCase]:
    return [VanishingCase(way, lr) for way, lr in RATES.items()]


def variants(**changes: str) -> list[VanishingCase]:
    """The main cases with another loss or activation."""
    return [replace(case, **changes) for case in main_cases()]  # type: ignore[arg-type]


def adaptive_cases() -> list[VanishingCase]:
    return [VanishingCase(way, ADAPTIVE_RATE) for way in ADAPTIVE]


def tuning_cases(lrs: Sequence[float], ways: Sequence[str] = TUNED) -> list[VanishingCase]:
    return [VanishingCase(way, lr) for lr in lrs for way in ways]


def weight_cases(objective: str) -> list[VanishingCase]:
    """SGD-VGR with other weights of its penalty, which the paper does not give."""
    rate = RATES["SGD-VGR"]
    return [VanishingCase("SGD-VGR", rate, objective, weight=weight) for weight in (*VGR_WEIGHTS, VGR_WEIGHT)]


def judge(runs: VanishingRuns, effort: VanishingEffort) -> list[Claim]:
    """What the paper says, in its order."""
    first, second = VanishingCase("DDPNOpt", RATES["DDPNOpt"]), VanishingCase("DDPNOpt2nd", RATES["DDPNOpt2nd"])
    made = [
        _no_progress(runs),
        _all_escape(runs, tuning_cases(effort.lrs, ("DDPNOpt", "DDPNOpt2nd"))),
        _whatever_the_rate(runs, effort),
        _second_order(runs, first, second),
        _update_size(runs, first, second),
        _cross_entropy(runs),
        relu_claim(runs, effort),
        _adaptive(runs),
    ]
    if runs.seeds >= FEWEST_SEEDS:
        return made
    # what holds on one or two seeds is not yet shown; what fails on one has failed
    return [replace(each, holds=None, why="Too few seeds.") if each.holds else each for each in made]


def _depends_on_weight(runs: VanishingRuns, objective: str = "MMC") -> str:
    """Whether SGD-VGR is stuck at its main rate with a smaller penalty, as a sentence; empty if it is not."""
    known = [case for case in weight_cases(objective) if case in runs.of]
    stuck = [case.weight for case in known if runs.stuck([case])]
    free = [case.weight for case in known if case.weight not in stuck]
    if not stuck or not free:
        return ""
    return (
        f"On {len(runs.of[known[0]])} seeds SGD-VGR is stuck with a penalty of {max(stuck):g} and leaves the plateau "
        f"on most with {min(free):g} to {max(free):g}, while the others are stuck: the weight that the paper took, and "
        "does not give, would decide it."
    )


def _no_progress(runs: VanishingRuns) -> Claim:
    vgr, ekfac = VanishingCase("SGD-VGR", RATES["SGD-VGR"]), VanishingCase("EKFAC", RATES["EKFAC"])
    weight = _depends_on_weight(runs)
    holds: bool | None = runs.stuck([vgr, ekfac])
    why = "" if holds else f"They leave the plateau: {runs.escaping([vgr, ekfac])}."
    if not holds and runs.stuck([ekfac]) and weight:
        holds, why = None, weight
    return Claim(
        "SGD-VGR and EKFAC make no progress on the sigmoid network with the MMC loss.",
        holds,
        "stuck",
        f"{runs.final_losses([vgr, ekfac])} (plateau 50)",
        why,
    )


def _all_escape(runs: VanishingRuns, mine: Sequence[VanishingCase]) -> Claim:
    free = runs.free(mine)
    lost = sum(each.diverged for case in mine for each in runs.of[case])
    why = f"Escaped: {runs.escaping(mine)}; {lost} runs diverged."
    return Claim(
        "DDPNOpt and DDPNOpt2nd escape from vanishing gradients with all tested learning rates.",
        free,
        "all escape",
        runs.final_losses(mine),
        "" if free else why,
    )


def _whatever_the_rate(runs: VanishingRuns, effort: VanishingEffort) -> Claim:
    theirs = tuning_cases(effort.lrs, ("SGD-VGR", "EKFAC"))
    holds: bool | None = runs.stuck(theirs)
    why = "" if holds else f"Escaped: {runs.escaping(case for case in theirs if runs.escapes(case))}."
    weight = _depends_on_weight(runs)
    if not holds and weight and runs.stuck(case for case in theirs if case.way == "EKFAC"):
        holds, why = None, weight
    return Claim(
        "The training of SGD-VGR and EKFAC is the same, stuck, whatever the learning rate.",
        holds,
        "all stuck",
        runs.final_losses(theirs),
        why,
    )


def _second_order(runs: VanishingRuns, first: VanishingCase, second: VanishingCase) -> Claim:
    lower = difference(runs.finals(first), runs.finals(second))
    holds = False if not runs.escapes(second) else lower.positive
    if holds and not runs.free([second]):
        holds = None
    whys = {
        True: "",
        None: f"With second order {runs.escapes(second)} of {len(runs.of[second])} seeds escape and "
        f"{sum(each.diverged for each in runs.of[second])} diverge; it is decided when all escape, or none.",
        False: "Second order leaves the plateau on no seed, or ends higher than first order.",
    }
    return Claim(
        "The effect becomes significant when the dynamics is expanded to second order.",
        holds,
        "lower loss with second order",
        runs.final_losses([first, second]),
        whys[holds],
    )


def _update_size(runs: VanishingRuns, first: VanishingCase, second: VanishingCase) -> Claim:
    ekfac = VanishingCase("EKFAC", RATES["EKFAC"])
    one, two = norm_ratio(runs, first, ekfac), norm_ratio(runs, second, ekfac)
    low, high = (math.log(end) for end in LARGER)
    holds = one.within(low, high)
    whys = {
        True: "",
        None: f"The margin of error over {one.seeds} seeds reaches over an end of that range.",
        False: f"It is outside that range, beyond the margin of error over {one.seeds} seeds.",
    }
    return Claim(
        "The update of DDPNOpt is typically 5 to 10 times larger.",
        holds,
        "5 to 10 times",
        f"{_times(one)} EKFAC's at the same learning rate, DDPNOpt2nd's {_times(two)}",
        whys[holds],
    )


def _times(ratio: Estimate) -> str:
    if not math.isfinite(ratio.mean):
        return "unknown times (diverged)"
    text = f"{compact(math.exp(ratio.mean))} times"
    if not math.isfinite(ratio.error):
        return text
    return f"{text} ({compact(math.exp(ratio.mean - ratio.error))} to {compact(math.exp(ratio.mean + ratio.error))})"


def norm_ratio(runs: VanishingRuns, case: VanishingCase, other: VanishingCase) -> Estimate:
    """Logarithm of the ratio of mean norms of an update over all layers, of seeds where neither run diverged."""
    pairs = [
        (fmean(a.norms), fmean(b.norms))
        for a, b in zip(runs.of[case], runs.of[other], strict=True)
        if a.norms and b.norms and not a.diverged and not b.diverged
    ]
    return Estimate.of(math.log(a / b) for a, b in pairs if a > 0 and b > 0)


def readings_table(runs: VanishingRuns, judged: Reading) -> Table:
    """Leaving the plateau and the size of an update in every reading that was run."""
    ekfac = VanishingCase("EKFAC", RATES["EKFAC"])
    rows = []
    for name, each in READINGS.items():
        for way in ("DDPNOpt", "DDPNOpt2nd"):
            case = VanishingCase(way, RATES[way], reading="" if each == judged else name)
            if case in runs.of:
                rows.append(
                    {
                        "V_xx": each.label,
                        "method": way,
                        "training loss": spread(runs.finals(case)),
                        "escaped": f"{runs.escapes(case)} of {len(runs.of[case])}",
                        "update, times EKFAC's": _times(norm_ratio(runs, case, ekfac)),
                    }
                )
    caption = f"The readings of V_xx side by side, MMC, sigmoid; the claims are judged in '{judged.label}'."
    return Table("readings", caption, pd.DataFrame(rows))


def _cross_entropy(runs: VanishingRuns) -> Claim:
    cases = variants(objective="CE")
    holds: bool | None = runs.stuck(cases)
    why = "" if holds else f"Escaped: {runs.escaping(case for case in cases if runs.escapes(case))}."
    weight = _depends_on_weight(runs, "CE")
    if not holds and weight and runs.stuck(case for case in cases if case.way != "SGD-VGR"):
        holds, why = None, weight
    return Claim(
        "With cross-entropy none escapes.",
        holds,
        "all stuck",
        f"{runs.final_losses(cases)} (plateau 2.30)",
        why,
    )


def _adaptive(runs: VanishingRuns) -> Claim:
    star = VanishingCase("DDPNOpt*", ADAPTIVE_RATE)
    others = [VanishingCase(way, ADAPTIVE_RATE) for way in ("Adam", "RMSprop")]

    def progress(case: VanishingCase) -> list[float]:
        return [math.inf if run.diverged else fmean(run.losses) for run in runs.of[case]]

    sooner = [difference(progress(other), progress(star)) for other in others]
    verdicts = [each.ahead(len(others)) for each in sooner]
    holds = all_of(verdicts)
    leads = ", ".join(f"{other.way} {lead.text(2)}" for other, lead in zip(others, sooner, strict=True))
    within = [each for each, verdict in zip(sooner, verdicts, strict=True) if verdict is None]
    decided = would_decide(joint_seeds(within, len(others)), len(runs.of[star]))
    whys = {
        True: "",
        None: f"Its lead is within its margin of error ({leads}); {decided}.",
        False: f"At least one of them is faster, beyond the margin of error; its lead: {leads}.",
    }
    means = ", ".join(f"{case.way} {spread(progress(case))}" for case in (star, *others))
    return Claim(
        "DDPNOpt* (adaptive diagonal) converges faster than Adam and RMSprop.",
        holds,
        "faster",
        f"mean loss over the run: {means}",
        whys[holds],
    )
