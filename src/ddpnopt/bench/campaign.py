"""All runs of a benchmark of learning rates: which there are, which are missing, and how they get into the store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ddpnopt.bench.contenders import Contender
from ddpnopt.bench.pool import execute
from ddpnopt.bench.runs import Outcome, Run
from ddpnopt.bench.store import Store
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


def unfinished(wanted: Sequence[Run], store: Store) -> list[Run]:
    """Those that the store does not hold, each computation once."""
    there = store.outcomes().keys()
    return [run for key, run in {run.key: run for run in wanted}.items() if key not in there]


def carry_out(
    missing: Sequence[Run], store: Store, code: str, jobs: int, data_dir: Path | None
) -> Iterator[tuple[Run, Outcome | None]]:
    """Computes runs and puts each into the store before telling of it."""
    if not missing:
        return
    for run, outcome in execute(missing, jobs, data_dir):
        if outcome is not None:
            store.add(run.key, outcome, code)
        yield run, outcome


def _only(rates: list[float], only: Sequence[float] | None) -> list[float]:
    """Those that are asked for; 0.003 means the half decade 0.00316."""
    if only is None:
        return rates
    return [rate for rate in rates if any(abs(rate / wish - 1) < 0.1 for wish in only if wish > 0)]
