"""Verdicts with errors: a difference decides a claim if it is larger than its margin of error, else the claim is open.

Runs of the same seed share data, weights and batches, so that differences are taken seed by seed. The margin is that of
95 % by Student's t: two standard errors with thirty seeds, more with few; 2.2 with more than thirty, which are run only
after a look at thirty, and 2.4 with more than 150, after a second look. Fewer than three seeds decide nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

from ddpnopt.lab.paper.item import Claim
from ddpnopt.lab.paper.readings import Reading

FEWEST_SEEDS = 3
CHANCE = 0.05
"""How often a claim is decided by chance alone."""
USUAL_SEEDS = 30
"""More are run only where so many have left a claim open."""
SECOND_LOOK = 150
"""More still are run only where so many have left a claim open."""
TWO_LOOKS, THREE_LOOKS = 1.111, 1.218
"""How much wider for the looks before. Two: Pocock's bound, 2.178 standard errors instead of 1.960. Three: 2.388, as
if they were independent, since each has several times as many seeds as the one before and Pocock's takes equal steps.
"""
ROUNDING = 1e-9
MOST_SEEDS = 2000
"""More than anybody will run."""


RULE = "its margin of error, 95 % by Student's t over the seeds"


def rule(seeds: int) -> str:
    """What a difference has to exceed, with so many seeds."""
    before = f"{USUAL_SEEDS} and {SECOND_LOOK}" if seeds > SECOND_LOOK else f"{USUAL_SEEDS}"
    return RULE + (f", wider because the first {before} had been looked at before" if seeds > USUAL_SEEDS else "")


def standard_errors(seeds: int, comparisons: int = 1, usual: int = USUAL_SEEDS) -> float:
    """How many of them are the margin of error.

    Beyond the `usual` number of seeds it is wider, since the first of them have been looked at; and it is wider where
    any of several comparisons may decide (Bonferroni).
    """
    chance = CHANCE / (2 * comparisons)
    quantile = student_quantile(1 - chance, max(seeds, FEWEST_SEEDS) - 1)
    looks = THREE_LOOKS if seeds > SECOND_LOOK else TWO_LOOKS if seeds > usual else 1.0
    return quantile * looks


def student_quantile(probability: float, degrees: int) -> float:
    """Of Student's t, above one half and for two degrees of freedom or more: Fisher's expansion from the normal one."""
    if degrees == 2:
        inner = 2 * probability - 1
        return inner * math.sqrt(2 / (1 - inner**2))
    z = NormalDist().inv_cdf(probability)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / degrees**power for power, term in enumerate(terms))


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and its standard error, which is infinite where there are too few."""

    mean: float
    error: float
    seeds: int
    usual: int = USUAL_SEEDS
    """With more than so many, it is the second look at them."""

    @classmethod
    def of(cls, values: Iterable[float], usual: int = USUAL_SEEDS) -> Estimate:
        numbers = list(values)
        enough = len(numbers) >= FEWEST_SEEDS and all(map(math.isfinite, numbers))
        error = stdev(numbers) / math.sqrt(len(numbers)) if enough else math.inf
        return cls(fmean(numbers) if numbers else math.nan, error, len(numbers), usual)

    @property
    def margin(self) -> float:
        return standard_errors(self.seeds, usual=self.usual) * self.error

    def behind(self, comparisons: int) -> bool:
        """Whether it is negative, beyond the error of the worst of several comparisons."""
        return -self.mean > standard_errors(self.seeds, comparisons, self.usual) * self.error

    @property
    def positive(self) -> bool | None:
        """True or False where the sign is beyond the error, None within it."""
        if not math.isfinite(self.mean) or abs(self.mean) <= self.margin:
            return None
        return self.mean > 0

    def ahead(self, rivals: int) -> bool | None:
        """The verdict on the lead over one of several rivals, where all must be behind and one refutes."""
        return False if self.behind(rivals) else self.positive or None

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
        return self.seeds_to_decide()

    def seeds_to_decide(self, comparisons: int = 1) -> int | None:
        """The same where any of several comparisons may decide."""
        if self.mean == 0 or not math.isfinite(self.mean) or not math.isfinite(self.error):
            return None
        wanted = (abs(self.mean) / self.error) ** 2 / self.seeds if self.error else math.inf
        return next(
            (
                n
                for n in range(FEWEST_SEEDS, MOST_SEEDS)
                if standard_errors(n, comparisons, self.usual) ** 2 / n < wanted
            ),
            None,
        )

    def text(self, digits: int) -> str:
        """Mean ± standard error, with a sign."""
        shown = f"{self.mean:+.{digits}f}"
        return f"{shown} ± {self.error:.{digits}f}" if math.isfinite(self.error) else shown


def difference(ours: Sequence[float], theirs: Sequence[float], usual: int = USUAL_SEEDS) -> Estimate:
    """Of the seeds that both have, which are the first ones of each."""
    return Estimate.of((a - b for a, b in zip(ours, theirs, strict=False)), usual)


def better(gains: Iterable[float]) -> bool:
    """Above zero on the mean, by more than rounding: accuracies on a small set are often equal."""
    return fmean(gains) > ROUNDING


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


def joint_seeds(leads: Sequence[Estimate], comparisons: int = 1) -> int | None:
    """How many seeds decide whether all open leads are positive: one that is negative refutes, else all must be."""
    behind = [found for lead in leads if lead.mean < 0 and (found := lead.seeds_to_decide(comparisons)) is not None]
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


def lead_over(
    ours: Sequence[float],
    theirs: Sequence[float],
    learned: Sequence[bool],
    comparisons: int,
    usual: int = USUAL_SEEDS,
) -> tuple[bool | None, Estimate]:
    """Whether one method is ahead of one of several rivals, and its lead.

    Seeds on which the rival diverged or did not learn are left out, in favour of the rival: what is ahead of the others
    is ahead of all. It is behind where the lead over all seeds is negative, beyond the error of the worst of the
    `comparisons` with its rivals: one of them refutes, while all are needed to be the best.
    """
    whole = difference(ours, theirs, usual)
    if whole.behind(comparisons):
        return False, whole
    pairs = zip(ours, theirs, learned, strict=False)
    # counted from the seeds that were run: where some are left out, it is no less a second look
    again = usual if len(learned) <= usual else 0
    kept = Estimate.of((a - b for a, b, good in pairs if good), again)
    return (True if kept.positive else None), kept if kept.seeds else whole


def fair(verdict: bool | None, *, rival_seeds: int, rival_epochs: int) -> tuple[bool | None, str]:
    """A win counts only against a rival that learned on enough seeds and had more than one epoch."""
    if not verdict:
        return verdict, ""
    if rival_seeds < FEWEST_SEEDS:
        return None, f"the rival has {rival_seeds} seed{'s' if rival_seeds > 1 else ''} only"
    return (None, "the rival has one epoch only") if rival_epochs < 2 else (verdict, "")
