"""Time and memory of a step as ratios to SGD's, measured side by side."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from ddpnopt.bench.memory import peak_bytes
from ddpnopt.bench.networks import Network
from ddpnopt.bench.steppers import UNIT, Form, Stepper, ready

BLOCK_SECONDS = 0.02
"""A block of steps lasts at least this long: shorter ones are mostly noise of the clock and the scheduler."""
LARGEST_BLOCK = 50


@dataclass(frozen=True)
class Cost:
    """What a step of one form costs on one network."""

    network: Network
    batch_size: int
    form: Form
    seconds: tuple[float, ...]
    """Of a step, in each round; empty where the form does not apply."""
    unit_seconds: tuple[float, ...]
    """Of SGD's step right before."""
    bytes: int
    unit_bytes: int

    @property
    def applies(self) -> bool:
        return bool(self.seconds)

    @property
    def ratios(self) -> list[float]:
        """Round by round, so that what else the machine does falls on both."""
        return [mine / unit for mine, unit in zip(self.seconds, self.unit_seconds, strict=True)]

    @property
    def ratio(self) -> float:
        return median(self.ratios) if self.seconds else math.nan

    @property
    def quartiles(self) -> tuple[float, float]:
        if len(self.seconds) < 2:
            return self.ratio, self.ratio
        low, _, high = quantiles(self.ratios, n=4, method="inclusive")
        return low, high

    @property
    def milliseconds(self) -> float:
        return 1000 * median(self.seconds) if self.seconds else math.nan

    @property
    def memory_ratio(self) -> float:
        return self.bytes / self.unit_bytes if self.bytes else math.nan


def measure(
    network: Network,
    batch_size: int,
    chosen: Sequence[Form],
    repeats: int,
    on_block: Callable[[Form], None] = lambda _: None,
) -> list[Cost]:
    """All forms on one network; in every round each has its turn, right after a block of SGD."""
    steppers = {form.name: ready(form, network, batch_size) for form in chosen}
    there: dict[str, Stepper] = {name: stepper for name, stepper in steppers.items() if stepper is not None}
    sizes = {name: peak_bytes(stepper) for name, stepper in there.items()}
    steps = {name: _block(stepper) for name, stepper in there.items()}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in there}
    collecting = gc.isenabled()
    gc.disable()  # a collection in mid-step would be charged to whoever happens to run
    try:
        for turn in range(repeats):
            order = list(there)
            # Each round begins with another one, or the first would always meet the cold cache.
            shift = turn % len(order)
            for name in order[shift:] + order[:shift]:
                unit = _time(there[UNIT], steps[UNIT])
                taken[name].append((unit if name == UNIT else _time(there[name], steps[name]), unit))
                on_block(there[name].form)
            gc.collect()
    finally:
        if collecting:
            gc.enable()
    return [
        Cost(
            network,
            batch_size,
            form,
            tuple(mine for mine, _ in taken.get(form.name, ())),
            tuple(unit for _, unit in taken.get(form.name, ())),
            sizes.get(form.name, 0),
            sizes[UNIT],
        )
        for form in chosen
    ]


def _time(stepper: Stepper, steps: int) -> float:
    """Seconds of one step. The first of a block only warms the caches which the others have used meanwhile."""
    stepper.reset()
    stepper.step()
    start = time.perf_counter()
    for _ in range(steps):
        stepper.step()
    return (time.perf_counter() - start) / steps


def _block(stepper: Stepper) -> int:
    """Steps in a block; one where a step is slow, of which a second to find that out would be one too many."""
    if _time(stepper, 1) > BLOCK_SECONDS:
        return 1
    return max(1, min(LARGEST_BLOCK, math.ceil(BLOCK_SECONDS / _time(stepper, 3))))
