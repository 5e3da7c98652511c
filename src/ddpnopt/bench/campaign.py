"""All runs of a benchmark of learning rates."""

from __future__ import annotations

from collections.abc import Sequence

from ddpnopt.bench.contenders import Contender
from ddpnopt.bench.runs import Run
from ddpnopt.bench.tasks import Task


def plan(
    chosen: Sequence[Task], methods: Sequence[Contender], seeds: int, points: int, only: Sequence[float] | None
) -> list[Run]:
    """Every run, in an order that makes parts useful: seed by seed, and the methods side by side on the clock."""
    runs = []
    for seed in range(seeds):
        for task in chosen:
            rates = {m.name: _only(m.rates(points), only) for m in methods}
            runs += [Run(task, m, None, seed) for m in methods]
            for position in range(points):
                runs += [Run(task, m, rates[m.name][position], seed) for m in methods if position < len(rates[m.name])]
    return runs


def _only(rates: list[float], only: Sequence[float] | None) -> list[float]:
    """Those that are asked for; 0.003 means the half decade 0.00316."""
    if only is None:
        return rates
    return [rate for rate in rates if any(abs(rate / wish - 1) < 0.1 for wish in only if wish > 0)]
