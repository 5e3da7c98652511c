"""Verdicts with errors: a difference decides a claim if it is larger than its margin of error, else the claim is open.

Runs of the same seed share data, weights and batches, so that differences are taken seed by seed. The margin is that of
95 % by Student's t: two standard errors with many seeds, more with few. Fewer than three seeds decide nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from ddpnopt.lab.paper.item import Claim
from ddpnopt.lab.paper.readings import Reading

FEWEST_SEEDS = 3
# From three seeds to thirty: a standard error that comes from few seeds is itself uncertain, and two of the error of
# three seeds would be exceeded by chance in 18 cases of 100.
QUANTILES = (
    4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10, 2.09, 2.09,
    2.08, 2.07, 2.07, 2.06, 2.06, 2.06, 2.05, 2.05, 2.05,
)  # fmt: skip
MANY = 2.0
"""Standard errors with more seeds than that."""
MOST_SEEDS = 2000
"""More than anybody will run."""
RULE = "its margin of error, 95 % by Student's t over the seeds"


def standard_errors(seeds: int) -> float:
    """How many of them are the margin of error."""
    place = seeds - FEWEST_SEEDS
    return QUANTILES[max(place, 0)] if place < len(QUANTILES) else MANY


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and its standard error, which is infinite where there are too few."""

    mean: float
    error: float
    seeds: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Estimate:
        numbers = list(values)
        enough = len(numbers) >= FEWEST_SEEDS and all(map(math.isfinite, numbers))
        error = stdev(numbers) / math.sqrt(len(numbers)) if enough else math.inf
        return cls(fmean(numbers) if numbers else math.nan, error, len(numbers))

    @property
    def margin(self) -> float:
        return standard_errors(self.seeds) * self.error

    @property
    def positive(self) -> bool | None:
        """True or False where the sign is beyond the error, None within it."""
        if not math.isfinite(self.mean) or abs(self.mean) <= self.margin:
            return None
        return self.mean > 0

    def within(self, low: float, high: float) -> bool | None:
        """Whether it lies in a range: None where the error reaches over one of its ends."""
        if not math.isfinite(self.mean) or not math.isfinite(self.error):
            return None
        if low <= self.mean - self.margin and self.mean + self.margin <= high:
            return True
        return False if self.mean + self.margin < low or self.mean - self.margin > high else None

    @property
    def decisive_seeds(self) -> int | None:
        """How many would decide the sign if mean and spread stay as they are; None for more than can be run."""
        if self.mean == 0 or not math.isfinite(self.mean) or not math.isfinite(self.error):
            return None
        wanted = (abs(self.mean) / self.error) ** 2 / self.seeds if self.error else math.inf
        return next((n for n in range(FEWEST_SEEDS, MOST_SEEDS) if standard_errors(n) ** 2 / n < wanted), None)

    def text(self, digits: int) -> str:
        """Mean ± standard error, with a sign."""
        shown = f"{self.mean:+.{digits}f}"
        return f"{shown} ± {self.error:.{digits}f}" if math.isfinite(self.error) else shown


def difference(ours: Sequence[float], theirs: Sequence[float]) -> Estimate:
    """Of the seeds that both have, which are the first ones of each."""
    return Estimate.of(a - b for a, b in zip(ours, theirs, strict=False))


def jackknife(statistic: Callable[[Sequence[int]], float], seeds: int) -> Estimate:
    """A statistic of all seeds, and its error by leaving out one after the other."""
    everyone = list(range(seeds))
    whole = statistic(everyone)
    if seeds < FEWEST_SEEDS:
        return Estimate(whole, math.inf, seeds)
    parts = [statistic([seed for seed in everyone if seed != left_out]) for left_out in everyone]
    middle = fmean(parts)
    error = math.sqrt((seeds - 1) / seeds * sum((part - middle) ** 2 for part in parts))
    return Estimate(whole, error, seeds)


def open_because(what: str, estimate: Estimate) -> str:
    """Why a claim is open, and how many seeds it would take."""
    if not math.isfinite(estimate.error):
        return f"{what} has no margin of error: fewer than {FEWEST_SEEDS} seeds, or one diverged."
    return f"{what} is within its margin of error; {would_decide(estimate.decisive_seeds, estimate.seeds)}."


def would_decide(needed: int | None, present: int) -> str:
    """How many seeds it would take, compared with those there are."""
    if needed is None:
        return f"more than {MOST_SEEDS:,} seeds would have to decide it ({present} here)"
    # two digits: the estimate is no better than that
    about = round(needed, min(0, 2 - len(str(needed))))
    return f"if mean and spread stay as they are, about {about:,} seeds decide it ({present} here)"


def joint_seeds(leads: Sequence[Estimate]) -> int | None:
    """How many seeds decide whether all open leads are positive: one that is negative refutes, else all must be."""
    behind = [found for lead in leads if lead.mean < 0 and (found := lead.decisive_seeds) is not None]
    if behind:
        return min(behind)
    wanted = [found for lead in leads if (found := lead.decisive_seeds) is not None]
    return max(wanted, default=None) if len(wanted) == len(leads) else None


def all_of(verdicts: Iterable[bool | None]) -> bool | None:
    """False if any is, else None if any is open, else True; nothing is open."""
    found = list(verdicts)
    if any(each is False for each in found):
        return False
    return True if found and all(found) else None


def held_elsewhere(claim: Claim, others: Sequence[tuple[Reading, Mapping[str, bool | None]]]) -> str:
    """In which other readings of V_xx a claim holds, as a sentence; `others` has their verdicts by the claim's text."""
    if not others:
        return ""
    good = [reading.label for reading, verdicts in others if verdicts.get(claim.text)]
    return f"It holds in the reading {' and in '.join(good)}." if good else "It holds in no other reading compared."


def fair(
    verdict: bool | None, *, rival_seeds: int, rival_epochs: int, rival_diverged: int, rival_stuck: int = 0
) -> tuple[bool | None, str]:
    """A win counts only against a rival with enough seeds, more than one epoch and no run that diverged or is stuck."""
    if not verdict:
        return verdict, ""
    for wanting, reason in (
        (rival_diverged > 0, f"{rival_diverged} of the rival's runs diverged"),
        (rival_stuck > 0, f"{rival_stuck} of the rival's runs did not learn"),
        (rival_seeds < FEWEST_SEEDS, f"the rival has {rival_seeds} seed{'s' if rival_seeds > 1 else ''} only"),
        (rival_epochs < 2, "the rival has one epoch only"),
    ):
        if wanting:
            return None, reason
    return verdict, ""
