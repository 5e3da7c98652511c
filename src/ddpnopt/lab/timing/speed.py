"""Time and memory of a step as ratios to SGD's, measured side by side."""

from __future__ import annotations

import gc
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median, quantiles

import torch

from ddpnopt.lab.methods.method import UNIT, Method
from ddpnopt.lab.timing.memory import peak_bytes
from ddpnopt.lab.timing.networks import Network
from ddpnopt.lab.timing.steppers import DoesNotApplyError, Stepper, ready, reasons

BLOCK_SECONDS = 0.02
"""A block of steps lasts at least this long: shorter ones are mostly noise of the clock and the scheduler."""
LARGEST_BLOCK = 50
FIRST = 20
"""Steps that count as the start of training; as many before the later ones that they are compared with."""


def now() -> float:
    """Seconds: of the processor with one thread, so that other programs hardly matter, or else of the clock."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


@dataclass(frozen=True)
class Cost:
    """What a step of one method costs on one network."""

    network: Network
    batch_size: int
    method: Method
    seconds: tuple[float, ...]
    """Of a step, in each round; empty where the method does not apply."""
    unit_seconds: tuple[float, ...]
    """Of SGD's step right before."""
    bytes: int
    unit_bytes: int
    reason: str = ""
    """Why the method does not apply."""
    start: float = math.nan
    """The first steps over as many later ones."""
    repeated: float = 0.0
    """Share of the timed steps whose forward sweep ran more than once; their time is included."""

    @property
    def applies(self) -> bool:
        return bool(self.seconds)

    @property
    def ratios(self) -> list[float]:
        """Round by round, so that other work on the machine affects both."""
        return [mine / unit for mine, unit in zip(self.seconds, self.unit_seconds, strict=True)]

    @property
    def ratio(self) -> float:
        return median(self.ratios) if self.seconds else math.nan

    @property
    def quartiles(self) -> tuple[float, float]:
        return middle_half(self.ratios or [math.nan])

    @property
    def milliseconds(self) -> float:
        return 1000 * median(self.seconds) if self.seconds else math.nan

    @property
    def memory_ratio(self) -> float:
        return self.bytes / self.unit_bytes if self.bytes else math.nan


def middle_half(values: Sequence[float]) -> tuple[float, float]:
    """The first and the third quartile."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, high


def relative(cost: Cost, base: Cost) -> list[float]:
    """How many times as long as another method, round by round, each in units of the SGD right before it."""
    return [mine / other for mine, other in zip(cost.ratios, base.ratios, strict=True)]


def measure(
    network: Network,
    batch_size: int,
    chosen: Sequence[Method],
    repeats: int,
    on_block: Callable[[Method], None] = lambda _: None,
    *,
    start: bool = False,
) -> list[Cost]:
    """All methods on one network; in every round each is timed once, right after a block of SGD.

    With `start` also the first steps of SGD and of `DDPNOpt(model)`, except on large networks.
    """
    with _undisturbed():
        found = {}
        for method in chosen:
            from_start = start and not network.large and method.name in (UNIT, "ddpnopt")
            found[method.name] = _Candidate(method, network, batch_size, from_start)
        unit = found[UNIT]
        for turn in range(repeats):
            order = [each for each in found.values() if each.applies]
            # Each round begins with another one, or the first would always meet the cold cache.
            shift = turn % len(order)
            for each in order[shift:] + order[:shift]:
                before = _time(unit.stepper, unit.steps)
                each.turn(before, before if each is unit else None)
                on_block(each.method)
            gc.collect()
    return [each.cost(unit.bytes) for each in found.values()]


class _Candidate:
    """A method on a network, and what was measured of it; without a stepper once it has failed."""

    def __init__(self, method: Method, network: Network, batch_size: int, start: bool) -> None:
        self.method, self.network, self.batch_size = method, network, batch_size
        self.taken: list[tuple[float, float]] = []
        self.reason = ""
        self.start = math.nan
        self.timed = self.repeated = 0
        try:
            with reasons(method):
                if start:
                    self.start = start_ratio(ready(method, network, batch_size, warm=False))
            self.stepper = ready(method, network, batch_size)
            with reasons(method):
                self.bytes, self.steps = peak_bytes(self.stepper), block_steps(self.stepper)
        except DoesNotApplyError as error:
            self.reason = str(error)

    @property
    def applies(self) -> bool:
        return not self.reason

    def turn(self, unit: float, mine: float | None) -> None:
        """One block, with the time of SGD's step right before; its own where that is known already."""
        try:
            with reasons(self.method):
                before = self.stepper.repeated
                self.taken.append((_time(self.stepper, self.steps) if mine is None else mine, unit))
                self.repeated += self.stepper.repeated - before
                self.timed += self.steps
        except DoesNotApplyError as error:
            self.reason = str(error)

    def cost(self, unit_bytes: int) -> Cost:
        taken = self.taken if self.applies else []
        return Cost(
            self.network,
            self.batch_size,
            self.method,
            tuple(mine for mine, _ in taken),
            tuple(unit for _, unit in taken),
            self.bytes if self.applies else 0,
            unit_bytes,
            self.reason,
            self.start,
            self.repeated / max(1, self.timed),
        )


@contextmanager
def _undisturbed() -> Iterator[None]:
    """No garbage collection during a step, which would be charged to one method, and no warnings of other packages."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if collecting:
            gc.enable()


def _time(stepper: Stepper, steps: int) -> float:
    """Seconds of one step. The first of a block only warms the caches which the others have used meanwhile."""
    stepper.step()
    start = now()
    for _ in range(steps):
        stepper.step()
    return (now() - start) / steps


def start_ratio(stepper: Stepper) -> float:
    """The time of the first steps of a training, in units of that of later ones."""
    times = []
    for _ in range(3):
        start = now()
        for _ in range(FIRST):
            stepper.step()
        times.append(now() - start)
    return times[0] / times[2]


def block_steps(stepper: Stepper) -> int:
    """Steps in a block; one period where a step is slow, found out with a single step.

    Always whole periods, or the steps that refresh something would be counted too seldom or too often.
    """
    period = stepper.method.timing.period
    if _time(stepper, 1) > BLOCK_SECONDS:
        return period
    steps = max(1, min(LARGEST_BLOCK, math.ceil(BLOCK_SECONDS / _time(stepper, 3))))
    return period * math.ceil(steps / period)
