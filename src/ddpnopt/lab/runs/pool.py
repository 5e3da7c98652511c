"""Runs in several processes of one torch thread each: on small networks more runs at once beat more threads."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import torch

from ddpnopt.lab.errors import ExperimentError
from ddpnopt.lab.methods.registry import method
from ddpnopt.lab.runs.bfloat16 import allow_bfloat16
from ddpnopt.lab.runs.outcome import Outcome
from ddpnopt.lab.runs.work import WorkUnit


def execute(
    units: Sequence[WorkUnit], jobs: int, data_dir: Path | None
) -> Iterator[tuple[WorkUnit, list[Outcome | None]]]:
    """The units and their outcomes as they finish."""
    if any(method(run.method).needs_bfloat16 for unit in units for run in unit.runs):
        allow_bfloat16()
    if jobs == 1:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            for unit in units:
                yield unit, unit.perform(data_dir)
        finally:
            torch.set_num_threads(before)
        return
    context = multiprocessing.get_context("spawn")  # a forked process hangs in torch's thread pool
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin, initargs=(os.getpid(),)) as pool:
        waiting: dict[Future[list[Outcome | None]], WorkUnit] = {}
        left = iter(units)
        try:
            while True:
                for unit in left:
                    waiting[pool.submit(_work, unit, data_dir)] = unit
                    if len(waiting) > jobs:  # one in reserve; the rest stay here, so that an end comes soon
                        break
                if not waiting:
                    return
                for done in wait(waiting, return_when=FIRST_COMPLETED).done:
                    yield waiting.pop(done), done.result()
        except BrokenProcessPool as ended:
            raise ExperimentError(
                "a process of the runs was ended from outside, perhaps because memory ran out; finished runs are kept: "
                "repeat the command, with fewer --jobs if memory is short"
            ) from ended
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _work(unit: WorkUnit, data_dir: Path | None) -> list[Outcome | None]:
    return unit.perform(data_dir)


def _begin(parent: int) -> None:
    torch.set_num_threads(1)

    def watch() -> None:
        # A worker does not notice that its parent was killed; it would wait for work for ever.
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
