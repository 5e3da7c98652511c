"""A sweep: which of the wanted runs are missing, and how they get into the store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ddpnopt.lab.runs import cluster, pool
from ddpnopt.lab.runs.outcome import Outcome
from ddpnopt.lab.runs.store import Store
from ddpnopt.lab.runs.work import J, Unit


def unfinished(wanted: Sequence[J], store: Store) -> list[J]:
    """Those that the store does not hold, each computation once."""
    there = store.keys()
    return [run for key, run in {run.key: run for run in wanted}.items() if key not in there]


def carry_out(
    units: Sequence[Unit[J]], store: Store, *, jobs: int = 1, data_dir: Path | None = None, ray: bool = False
) -> Iterator[tuple[J, Outcome | None]]:
    """Computes runs, here or on a Ray cluster, and puts each into the store before telling of it."""
    if not units:
        return
    finished = cluster.execute(units, data_dir) if ray else pool.execute(units, jobs, data_dir)
    for unit, outcomes in finished:
        pairs = list(zip(unit.jobs, outcomes, strict=True))
        store.add({job.key: outcome for job, outcome in pairs if outcome is not None})
        yield from pairs
