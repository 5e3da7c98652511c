"""Runs in several processes of one torch thread each: on small networks more runs at once beat more threads."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path

import torch

from ddpnopt.bench.contenders import ABLATIONS, CONTENDERS
from ddpnopt.bench.runs import Outcome, Refused, Run, perform
from ddpnopt.bench.tasks import Task

Order = tuple[Task, str, bool, "float | None", int]
"""A run as it travels to a process: factories cannot be pickled, so the method goes by its name and its list."""


def execute(runs: Sequence[Run], jobs: int, data_dir: Path | None) -> Iterator[tuple[Run, Outcome | None]]:
    """The runs and their outcomes as they finish; None where the optimizer refuses the setting."""
    if jobs == 1:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            for run in runs:
                yield run, _perform(run, data_dir)
        finally:
            torch.set_num_threads(before)
        return
    context = multiprocessing.get_context("spawn")  # a forked process hangs in torch's thread pool
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin, initargs=(os.getpid(),)) as pool:
        waiting: dict[Future[Outcome | None], Run] = {}
        left = iter(runs)
        try:
            while True:
                for run in left:
                    waiting[pool.submit(_work, _order(run), data_dir)] = run
                    if len(waiting) > jobs:  # one in reserve; the rest stay here, so that an end comes soon
                        break
                if not waiting:
                    return
                for done in wait(waiting, return_when=FIRST_COMPLETED).done:
                    yield waiting.pop(done), done.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _perform(run: Run, data_dir: Path | None) -> Outcome | None:
    try:
        return perform(run, data_dir)
    except Refused:
        return None


def _order(run: Run) -> Order:
    return run.task, run.contender.name, CONTENDERS.get(run.contender.name) is run.contender, run.lr, run.seed


def _work(order: Order, data_dir: Path | None) -> Outcome | None:
    task, name, main_list, lr, seed = order
    return _perform(Run(task, (CONTENDERS if main_list else ABLATIONS)[name], lr, seed), data_dir)


def _begin(parent: int) -> None:
    torch.set_num_threads(1)

    def watch() -> None:
        # Nobody tells a worker that its parent was killed; it would wait for work for ever.
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
