"""A sweep: which of the wanted runs are missing, and how they get into the store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ddpnopt.lab.runs import cluster, pool
from ddpnopt.lab.runs.config import RunConfig
from ddpnopt.lab.runs.outcome import Outcome
from ddpnopt.lab.runs.stacking import work_units
from ddpnopt.lab.runs.store import Store
from ddpnopt.lab.runs.work import SingleRun, WorkUnit

OnRun = Callable[[int, int, RunConfig | None, Outcome | None], None]
"""Called with the number of finished runs, of all runs, and the run that has just finished, if any."""


def unfinished(wanted: Sequence[RunConfig], store: Store) -> list[RunConfig]:
    """Those that the store does not hold, each computation once."""
    there = store.keys()
    return [run for key, run in {run.key: run for run in wanted}.items() if key not in there]


def carry_out(
    units: Sequence[WorkUnit], store: Store, *, jobs: int = 1, data_dir: Path | None = None, ray: bool = False
) -> Iterator[tuple[RunConfig, Outcome | None]]:
    """Compute runs, here or on a Ray cluster, and put each into the store before it is returned."""
    if not units:
        return
    finished = cluster.execute(units, data_dir) if ray else pool.execute(units, jobs, data_dir)
    for unit, outcomes in finished:
        pairs = list(zip(unit.runs, outcomes, strict=True))
        store.add({run.key: outcome for run, outcome in pairs if outcome is not None})
        yield from pairs


def collect(
    wanted: Sequence[RunConfig],
    store: Store,
    *,
    jobs: int = 1,
    data_dir: Path | None = None,
    ray: bool = False,
    stacked: bool = True,
    on_run: OnRun = lambda *_: None,
) -> dict[RunConfig, Outcome]:
    """The outcome of every run: from the store, and what is missing is computed in `jobs` processes, none if 0.

    A run whose setting does not exist has none. Without `stacked` every run is computed by itself, so that its
    seconds are its own.
    """
    missing = unfinished(wanted, store) if jobs else []
    done = len(wanted) - len(missing)
    on_run(done, len(wanted), None, None)
    units: Sequence[WorkUnit] = work_units(missing) if stacked else [SingleRun(run) for run in missing]
    for run, outcome in carry_out(units, store, jobs=jobs, data_dir=data_dir, ray=ray):
        done += 1
        on_run(done, len(wanted), run, outcome)
    there = store.outcomes()
    return {run: there[key] for run in wanted if (key := run.key) in there}
