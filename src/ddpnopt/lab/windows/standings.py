"""The results of a task: windows of learning rates, best and default accuracies, times to a loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median, stdev

from ddpnopt.lab.methods.method import Method
from ddpnopt.lab.methods.registry import METHODS
from ddpnopt.lab.runs.classification import ClassificationTask
from ddpnopt.lab.runs.config import RunConfig
from ddpnopt.lab.runs.outcome import Curve, Outcome

LOST = 10.0
"""A run whose loss ends above this many times that of guessing has diverged, even if it is finite."""
MARGIN = 2.0
"""A learning rate is in the window if its accuracy is within this many points of the best of all methods."""
TARGET_SHARE = 2 / 3
"""The loss to reach is the best baseline's at this share of its run: late, but before its very end."""


@dataclass(frozen=True)
class Point:
    """One learning rate of one method, over the seeds."""

    lr: float
    """The rate that was used."""
    outcomes: tuple[Outcome, ...]
    chance: float

    @property
    def accuracies(self) -> list[float]:
        """Of each seed; a run that ended in NaN or an error counts as guessing."""
        return [self.chance if o.diverged else o.accuracy for o in self.outcomes]

    @property
    def accuracy(self) -> float:
        return fmean(self.accuracies)

    @property
    def spread(self) -> float:
        """The standard deviation over the seeds; NaN for a single one."""
        return stdev(self.accuracies) if len(self.outcomes) > 1 else math.nan

    @property
    def diverged(self) -> int:
        limit = LOST * math.log(100 / self.chance)
        return sum(o.diverged or loss_at(o, 1.0) > limit for o in self.outcomes)


@dataclass(frozen=True)
class Window:
    """The longest stretch of neighbouring learning rates that are good enough."""

    decades: float
    lowest: float
    highest: float
    open_ended: bool
    """It reaches the edge of what was tried, and may be wider."""

    @classmethod
    def none(cls) -> Window:
        return cls(0.0, math.nan, math.nan, False)

    @classmethod
    def everything(cls) -> Window:
        """Of a method without a rate: there is none to miss."""
        return cls(math.inf, math.nan, math.nan, False)


@dataclass(frozen=True)
class Standing:
    """One method on one task."""

    method: Method
    points: tuple[Point, ...]
    """One for each rate; of a method without a rate the default alone."""
    default: Point | None
    window: Window
    """Within two points of the best of all methods."""
    own_window: Window
    """Within two points of its own best."""
    best: Point
    seconds_to_loss: float
    """To the common loss, at its best learning rate; the median over the seeds, infinite if it never gets there."""
    time_ratio: float
    """The same, the fastest baseline being 1; NaN if it never gets there."""
    cpu_ratio: float
    default_time_ratio: float
    """The same at its default setting."""

    @property
    def has_rate(self) -> bool:
        return self.method.lowest_decade is not None

    @property
    def diverged(self) -> int:
        return sum(point.diverged for point in self.points)

    @property
    def runs(self) -> int:
        return sum(len(point.outcomes) for point in self.points)

    @property
    def errors(self) -> list[str]:
        """The kinds of exceptions that ended runs."""
        everything = [*self.points, *([self.default] if self.default else [])]
        return sorted({o.error.partition(":")[0] for point in everything for o in point.outcomes if o.error})


@dataclass(frozen=True)
class Standings:
    """All methods on one task."""

    task: ClassificationTask
    rows: tuple[Standing, ...]
    best_accuracy: float
    target: float
    """The loss to reach."""
    target_of: str
    """The baseline that sets it: the one with the best accuracy."""
    fastest: str
    """The baseline that is first to reach it, the unit of the times."""
    seeds: int
    fewest: int
    """Seeds of the learning rate that has the fewest."""

    @property
    def seeds_in_words(self) -> str:
        if self.seeds == 1:
            return "one seed"
        return f"{self.seeds} seeds" if self.fewest == self.seeds else f"{self.fewest} to {self.seeds} seeds"


def window(points: Sequence[Point], floor: float) -> Window:
    """The longest stretch with an accuracy of at least `floor`.

    Every point stands for the rates nearer to it than to its neighbours, so that one of a grid of half decades is
    half a decade wide.
    """
    rates = [math.log10(point.lr) for point in points]
    if len(rates) == 1:
        edges = [rates[0], rates[0]]
    else:
        inner = [(a + b) / 2 for a, b in pairwise(rates)]
        edges = [2 * rates[0] - inner[0], *inner, 2 * rates[-1] - inner[-1]]
    best, start = Window.none(), None
    good = [point.accuracy >= floor for point in points]
    for i in range(len(points)):
        if not good[i]:
            start = None
            continue
        start = i if start is None else start
        decades = round(edges[i + 1] - edges[start], 6)
        if decades > best.decades or math.isnan(best.lowest):
            best = Window(decades, points[start].lr, points[i].lr, start == 0 or i == len(points) - 1)
    return best


def _window(method: Method, points: Sequence[Point], floor: float) -> Window:
    if method.lowest_decade is None:
        return Window.everything() if points[0].accuracy >= floor else Window.none()
    return window(points, floor)


def time_to(curve: Curve, target: float, clock: Callable[[Curve], list[float]]) -> float:
    """When the loss first came down to `target`, interpolated between the samples; infinite if it never did."""
    times = clock(curve)
    if len(times) < 2:  # a run of which only the end is kept
        return math.inf
    for i, loss in enumerate(curve.losses):
        if loss <= target:
            if i == 0:
                return times[0]
            share = (curve.losses[i - 1] - target) / (curve.losses[i - 1] - loss)
            return times[i - 1] + share * (times[i] - times[i - 1])
    return math.inf


def loss_at(outcome: Outcome, share: float) -> float:
    """The training loss at this share of the run."""
    losses = outcome.curve.losses
    return losses[max(0, math.ceil(share * len(losses)) - 1)] if losses else math.inf


def wall(curve: Curve) -> list[float]:
    return curve.seconds


def cpu(curve: Curve) -> list[float]:
    return curve.cpu_seconds


def _seconds(point: Point, target: float) -> float:
    return median(math.inf if o.diverged else time_to(o.curve, target, wall) for o in point.outcomes)


def _ratio(point: Point | None, unit: Point | None, target: float, clock: Callable[[Curve], list[float]]) -> float:
    """The median over the seeds of time by time; NaN if more than half of them never get there."""
    if point is None or unit is None:
        return math.nan
    pairs = zip(point.outcomes, unit.outcomes, strict=False)
    ratios = [
        math.inf if mine.diverged else time_to(mine.curve, target, clock) / time_to(base.curve, target, clock)
        for mine, base in pairs
        if math.isfinite(time_to(base.curve, target, clock))
    ]
    middle = median(ratios) if ratios else math.nan
    return middle if math.isfinite(middle) else math.nan


def standings(task: ClassificationTask, outcomes: Mapping[RunConfig, Outcome]) -> Standings | None:
    """The table of a task from the runs that are there, in the order of the methods; None without any."""
    grouped: dict[str, dict[float | None, list[tuple[int, Outcome]]]] = {}
    for run, outcome in outcomes.items():
        if run.task == task:
            grouped.setdefault(run.method, {}).setdefault(run.lr, []).append((run.seed, outcome))
    swept: dict[str, tuple[Point, ...]] = {}
    defaults: dict[str, Point] = {}
    for name, by_rate in grouped.items():
        made = {rate: _point(found, task) for rate, found in by_rate.items()}
        if None in made:
            defaults[name] = made.pop(None)
        if METHODS[name].lowest_decade is None and name in defaults:
            swept[name] = (defaults[name],)
        elif made:
            swept[name] = tuple(sorted(made.values(), key=lambda point: point.lr))
    if not swept:
        return None
    bests = {name: max(points, key=lambda point: point.accuracy) for name, points in swept.items()}
    top = max(point.accuracy for point in bests.values())
    # If there are only forms of DDPNOpt, the best of them is the reference.
    baselines = [name for name in swept if not METHODS[name].is_ddpnopt] or list(swept)
    reference = max(baselines, key=lambda name: bests[name].accuracy)
    reached = [
        loss_at(o, TARGET_SHARE) for o in bests[reference].outcomes if len(o.curve.losses) > 1 and not o.diverged
    ]
    target = fmean(reached) if reached else math.nan
    waits = {name: _seconds(point, target) for name, point in bests.items()}
    fastest = min(baselines, key=lambda name: waits[name])
    unit = bests[fastest]
    rows = tuple(
        Standing(
            METHODS[name],
            points,
            defaults.get(name),
            _window(METHODS[name], points, top - MARGIN),
            _window(METHODS[name], points, bests[name].accuracy - MARGIN),
            bests[name],
            waits[name],
            _ratio(bests[name], unit, target, wall),
            _ratio(bests[name], unit, target, cpu),
            _ratio(defaults.get(name), unit, target, wall),
        )
        for name, points in sorted(swept.items(), key=lambda item: _place(METHODS[item[0]]))
    )
    seeds = [len(point.outcomes) for points in swept.values() for point in points]
    labels = METHODS[reference].label, METHODS[fastest].label
    return Standings(task, rows, top, target, *labels, max(seeds), min(seeds))


def _place(method: Method) -> tuple[bool, bool]:
    """DDPNOpt comes first, and of its forms the one without a rate."""
    return not method.is_ddpnopt, method.lowest_decade is not None


def _point(found: list[tuple[int, Outcome]], task: ClassificationTask) -> Point:
    ordered = tuple(outcome for _, outcome in sorted(found, key=lambda pair: pair[0]))
    return Point(ordered[0].lr, ordered, task.chance)
