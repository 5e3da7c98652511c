"""The same units of work on a Ray cluster: the one at RAY_ADDRESS, or a local one."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ddpnopt.lab.errors import ExperimentError
from ddpnopt.lab.runs.outcome import Outcome
from ddpnopt.lab.runs.work import WorkUnit


def execute(units: Sequence[WorkUnit], data_dir: Path | None) -> Iterator[tuple[WorkUnit, list[Outcome | None]]]:
    """The units and their outcomes as they finish; each takes one processor of the cluster."""
    ray = _ray()
    started = not ray.is_initialized()
    if started:
        _connect(ray)
    # A worker takes its data from the same folder, so on a cluster it must be shared or the hub be reachable.
    remote = ray.remote(num_cpus=1, max_retries=3)(_work)
    try:
        reserve = 2 * max(1, int(ray.cluster_resources().get("CPU", 1)))
        waiting: dict[Any, WorkUnit] = {}
        left = iter(units)
        while True:
            for unit in left:
                waiting[remote.remote(unit, data_dir)] = unit
                if len(waiting) >= reserve:
                    break
            if not waiting:
                return
            done, _ = ray.wait(list(waiting), num_returns=1)
            for each in done:
                unit = waiting.pop(each)
                try:
                    outcomes = ray.get(each)
                except ray.exceptions.RayTaskError as failed:
                    raise failed.cause from failed
                except ray.exceptions.RayError as lost:
                    raise ExperimentError(
                        f"the Ray cluster lost a run ({type(lost).__name__}); finished runs are kept: repeat the "
                        "command"
                    ) from lost
                yield unit, outcomes
    finally:
        if started:
            ray.shutdown()


def _ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as missing:
        raise ExperimentError("--ray needs Ray: pip install 'ddpnopt[ray]'") from missing


def _connect(ray: Any) -> None:
    address = os.environ.get("RAY_ADDRESS")
    try:
        # Without an address: a local cluster with a worker a core.
        ray.init(address=address, log_to_driver=False, include_dashboard=False if address is None else None)
    except Exception as failed:  # a refused connection, a time-out, other versions: each has a type of its own
        where = f"at RAY_ADDRESS={address}" if address else "on this machine"
        reason = (str(failed).strip().splitlines() or [type(failed).__name__])[0]
        raise ExperimentError(f"no Ray cluster could be reached {where}: {reason}") from failed


def _work(unit: WorkUnit, data_dir: Path | None) -> list[Outcome | None]:
    import torch

    torch.set_num_threads(1)
    return unit.perform(data_dir)
