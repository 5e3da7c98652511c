"""Captions, verdicts and numbers as text, the same in every item."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from statistics import mean, stdev

from matplotlib.figure import Figure

from ddpnopt.lab import style
from ddpnopt.lab.paper.item import Claim

LETTERS_PER_INCH = 16
"""Of the small type under a figure."""
HUGE = 1e5


def verdict(holds: bool | None) -> str:
    """In a word or two."""
    return "open" if holds is None else "holds" if holds else "does not hold"


def _word(claim: Claim) -> str:
    return verdict(claim.holds) if claim.judged else "not judged"


def caption(text: str, claims: Sequence[Claim]) -> str:
    """What the figure shows, then each claim of the paper and whether it holds here."""
    verdicts = [f"Paper: {claim.text} {_word(claim).capitalize()} here: {claim.ours}." for claim in claims]
    return " ".join([text, *verdicts])


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Mean and standard deviation over the seeds; of one seed, its value."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return "diverged"
    lost = len(values) - len(finite)
    shown = [mean(finite), *([stdev(finite)] if len(finite) > 1 else [])]
    # a loss that has all but diverged would fill a line with digits
    text = " ± ".join(compact(each) if abs(shown[0]) >= HUGE else f"{each:.{digits}f}" for each in shown)
    return f"{text} ({lost} diverged)" if lost else text


def compact(value: float) -> str:
    """A number to two digits, for values over many decades."""
    if 100 <= abs(value) < 1e5:
        return f"{value:.0f}"
    return f"{value:.2g}" if 0.01 <= abs(value) < 100 else f"{value:.1e}"


def finish(made: Figure, title: str, text: str) -> Figure:
    """The heading over a figure and its caption in small type below, wrapped to the width."""
    width = made.get_size_inches()[0]
    made.suptitle(title, x=0.012, ha="left", fontsize=12.5, fontweight="bold")
    lines = textwrap.wrap(text, round(LETTERS_PER_INCH * width))
    made.supxlabel("\n".join(lines), x=0.012, ha="left", fontsize=8, color=style.SOFT_INK)
    return made
