"""How the methods do on each task, compared with Adam at the best of its rates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from statistics import fmean, median

from ddpnopt.lab.runs.config import RunConfig
from ddpnopt.lab.runs.outcome import SETTLED, Curve, Outcome
from ddpnopt.lab.runs.search import counted
from ddpnopt.lab.style import smoothed
from ddpnopt.lab.suite.entrants import REFERENCE, Entrant
from ddpnopt.lab.suite.runs import SuiteRunTask
from ddpnopt.lab.suite.task import SuiteTask
from ddpnopt.lab.tables import Spread
from ddpnopt.lab.windows.standings import cpu, time_to

POINTS = 1.0
"""A difference that does not count, of a metric in percent."""
SHARE = 0.02
"""The same for other metrics, as a share of the reference's figure."""
COLLAPSED_BELOW = 0.5
"""Of the reference's way from chance."""
SMOOTHING = 5
"""Samples of a curve of fifty: a tenth of the run, over which its final loss is averaged as well."""


class Verdict(Enum):
    """Compared with the reference."""

    AHEAD = "ahead"
    LEVEL = "level"
    BEHIND = "behind"
    COLLAPSED = "collapsed"


@dataclass(frozen=True)
class MethodResult:
    """What a method reached on a task, over its seeds."""

    entrant: Entrant
    figure: Spread
    """The metric on the test split; a run that diverged counts as chance."""
    lr: float
    seeds: int
    diverged: int = 0
    seconds: float = math.nan
    """Of a run, on average, as `cpu_seconds`."""
    cpu_seconds: float = math.nan
    to_reference: float = math.nan
    """Processor time until the smoothed training loss is that with which the reference ends, from the same seed.

    The median over the seeds; infinite where most of them never come there, NaN without a reference."""
    time_ratio: float = math.nan
    """The same as a multiple of the reference's own time to it."""
    repeated: float = math.nan
    """The largest share of a run's steps that were made again, after the first ones; NaN where it is not known."""
    undone: int | None = None
    """Steps that were given up in all runs; None where it is not known."""

    @classmethod
    def of(
        cls, entrant: Entrant, task: SuiteRunTask, outcomes: Sequence[Outcome], reference: Sequence[Outcome] | None
    ) -> MethodResult:
        """From the runs with all seeds, and those of the reference."""
        known = [(each.repeated, each.steps - SETTLED) for each in outcomes if each.repeated is not None]
        undone = [each.undone for each in outcomes if each.undone is not None]
        seconds = own = math.nan
        if reference is not None:
            seconds, own = _time_to(outcomes, reference), _time_to(reference, reference)
        return cls(
            entrant,
            Spread.of(counted(outcome, task).metric for outcome in outcomes),
            outcomes[0].lr,
            len(outcomes),
            sum(outcome.diverged for outcome in outcomes),
            fmean(outcome.seconds for outcome in outcomes),
            fmean(outcome.cpu_seconds for outcome in outcomes),
            seconds,
            seconds / own if math.isfinite(own) else math.nan,
            max((repeated / steps for repeated, steps in known if steps > 0), default=math.nan),
            sum(undone) if undone else None,
        )


@dataclass(frozen=True)
class TaskResult:
    """All methods that have been run on a task."""

    task: SuiteRunTask
    results: Mapping[str, MethodResult]

    @property
    def definition(self) -> SuiteTask:
        return self.task.task

    @property
    def reference(self) -> MethodResult | None:
        return self.results.get(REFERENCE)

    @cached_property
    def chance(self) -> float:
        return self.task.untrained.metric

    def way(self, figure: float) -> float:
        """How far from chance, positive where it is better."""
        return (figure - self.chance) * (1 if self.task.higher_is_better else -1)

    def tolerance(self, one: Spread, other: Spread) -> float:
        """Smaller differences are none: a standard deviation over the seeds, a point, or a share of the figure."""
        deviations = [0.0 if math.isnan(each.std) else each.std for each in (one, other)]
        deviation = math.sqrt(fmean(each**2 for each in deviations))
        least = POINTS if "%" in self.definition.metric else SHARE * abs(other.mean)
        return max(deviation, least)

    def verdict(self, result: MethodResult) -> Verdict | None:
        """None without a reference."""
        if self.reference is None:
            return None
        mine, theirs = result.figure, self.reference.figure
        lead = self.way(mine.mean) - self.way(theirs.mean)
        if abs(lead) <= self.tolerance(mine, theirs):
            return Verdict.LEVEL
        if lead > 0:
            return Verdict.AHEAD
        lost = self.way(mine.mean) < COLLAPSED_BELOW * self.way(theirs.mean)
        return Verdict.COLLAPSED if lost else Verdict.BEHIND

    @cached_property
    def ranks(self) -> dict[str, float]:
        """1 for the best; equal figures share the mean of their places."""
        ways = {name: self.way(result.figure.mean) for name, result in self.results.items()}
        return {
            name: 1 + sum(other > mine for other in ways.values()) + (list(ways.values()).count(mine) - 1) / 2
            for name, mine in ways.items()
        }

    @cached_property
    def best(self) -> str:
        """The method with the best figure; the first of equal ones."""
        return max(self.results, key=lambda name: self.way(self.results[name].figure.mean))

    def shortfall(self, result: MethodResult) -> float:
        """How far behind the best method, as a share of its way from chance; 1 is chance."""
        whole = self.way(self.results[self.best].figure.mean)
        return 1 - self.way(result.figure.mean) / whole if whole > 0 else 0.0


def compare(
    tasks: Sequence[SuiteRunTask],
    methods: Sequence[Entrant],
    outcomes: Mapping[RunConfig, Outcome],
    seeds: int,
    kept: Mapping[tuple[str, str], MethodResult] | None = None,
) -> list[TaskResult]:
    """Every task on which a method has been run with all seeds, or has a result that is `kept` from another table."""
    made = []
    for task in tasks:
        found = {each.name: _outcomes(each, task, outcomes, seeds) for each in methods}
        reference = found.get(REFERENCE)
        results = {}
        for each in methods:
            runs = found[each.name]
            old = None if kept is None else kept.get((task.name, each.name))
            if runs is not None:
                results[each.name] = MethodResult.of(each, task, runs, reference)
            elif old is not None:
                results[each.name] = old
        if results:
            made.append(TaskResult(task, results))
    return made


def _outcomes(
    entrant: Entrant, task: SuiteRunTask, outcomes: Mapping[RunConfig, Outcome], seeds: int
) -> list[Outcome] | None:
    runs = entrant.runs(task, outcomes, seeds)
    return [outcomes[run] for run in runs] if runs and all(run in outcomes for run in runs) else None


def smooth(curve: Curve) -> Curve:
    """The curve with the mean of the last tenth of the run at each sample."""
    return replace(curve, losses=smoothed(curve.losses, SMOOTHING).tolist())


def _time_to(mine: Sequence[Outcome], theirs: Sequence[Outcome]) -> float:
    """The median processor time of runs to the final losses of others."""
    return median(
        math.inf if one.diverged or other.diverged else time_to(smooth(one.curve), smooth(other.curve).losses[-1], cpu)
        for one, other in zip(mine, theirs, strict=True)
    )
