"""How time and memory grow with the batch, the width or the depth: exponents fitted in log-log scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ddpnopt.lab.errors import UnknownNameError
from ddpnopt.lab.methods.method import Method
from ddpnopt.lab.timing.networks import Network, scaled
from ddpnopt.lab.timing.speed import Cost

SIZES: Mapping[str, tuple[int, ...]] = {
    "batch": (8, 16, 32, 64, 128, 256, 512, 1024, 2048),
    "width": (64, 128, 256, 512, 1024),
    "depth": (2, 4, 8, 16, 32),
}
BATCH, WIDTH, DEPTH = 64, 256, 4
"""What stays the same while something else grows."""


MODERATE = 512
"""Up to this batch size a second exponent is fitted: work on matrices of the batch's size is small until then."""


@dataclass(frozen=True)
class Growth:
    """The exponents of one method."""

    method: Method
    time: float
    memory: float
    costs: tuple[Cost, ...]
    beyond: float = math.nan
    """The exponent of the time in units of SGD's: the excess over SGD's, free of disturbances of the machine."""
    moderate: float | None = None
    """The same up to the moderate batch sizes, where it is the batch that grows."""


def cases(what: str) -> list[tuple[Network, int]]:
    """Networks and batch sizes in which one thing grows; an error lists what can grow."""
    if what not in SIZES:
        raise UnknownNameError("growth", what, SIZES)
    build: dict[str, Callable[[int], tuple[Network, int]]] = {
        "batch": lambda size: (scaled(WIDTH, DEPTH), size),
        "width": lambda size: (scaled(size, DEPTH), BATCH),
        "depth": lambda size: (scaled(WIDTH, size), BATCH),
    }
    return [build[what](size) for size in SIZES[what]]


def exponents(what: str, by_size: Sequence[Sequence[Cost]]) -> list[Growth]:
    """For every method, the exponent over the upper half of the sizes, where fixed costs matter least."""
    sizes = SIZES[what][: len(by_size)]
    found = []
    for costs in zip(*by_size, strict=True):
        if all(cost.applies for cost in costs):
            time = exponent(sizes, [cost.milliseconds for cost in costs])
            memory = exponent(sizes, [float(cost.bytes) for cost in costs])
            ratios = [cost.ratio for cost in costs]
            moderate = None
            if what == "batch" and sizes[-1] > MODERATE:
                few = [size for size in sizes if size <= MODERATE]
                moderate = exponent(few, ratios[: len(few)])
            found.append(Growth(costs[0].method, time, memory, tuple(costs), exponent(sizes, ratios), moderate))
    return found


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The least-squares fit of log(value) against log(size) over the upper half of the sizes."""
    start = len(sizes) // 2
    x, y = [math.log(s) for s in sizes[start:]], [math.log(v) for v in values[start:]]
    x_mean, y_mean = sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - x_mean) ** 2 for a in x)
    return sum((a - x_mean) * (b - y_mean) for a, b in zip(x, y, strict=True)) / spread if spread else math.nan
