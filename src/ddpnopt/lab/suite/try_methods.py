"""Compare methods on tasks of the suite, one row per run.

    python -m ddpnopt.lab.suite.try_methods --tasks vit,vae --methods adam:3e-3,sgd:0.1,ddpnopt --seed 0

A method is `adam:RATE`, `adamw:RATE`, `sgd:RATE` (momentum 0.9), `ddpnopt`, or `module:function` with a function that
takes the model and returns an optimizer. Without `--tasks`, all open tasks; sealed ones only by name or `--sealed`.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import multiprocessing
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from ddpnopt import DDPNOpt
from ddpnopt.lab.suite.tasks import TASKS, open_tasks
from ddpnopt.lab.suite.training import MakeOptimizer, SuiteOutcome, train

Job = tuple[str, str, int, int | None]


def method(spec: str) -> MakeOptimizer:
    """The optimizer's factory for a method as written on the command line."""
    name, _, argument = spec.partition(":")

    def make(model: nn.Module) -> Optimizer:
        parameters = model.parameters()
        if name == "adam":
            return Adam(parameters, lr=float(argument))
        if name == "adamw":
            return AdamW(parameters, lr=float(argument))
        return SGD(parameters, lr=float(argument), momentum=0.9)

    if name == "ddpnopt":
        return DDPNOpt
    if name in ("adam", "adamw", "sgd"):
        float(argument)
        return make
    if not argument:
        raise ValueError(f"{spec!r} is neither a known method with a rate nor module:function")
    loaded: MakeOptimizer = getattr(importlib.import_module(name), argument)
    return loaded


def run(job: Job) -> tuple[Job, SuiteOutcome]:
    """One run; at module level so that a worker process finds it."""
    task, spec, seed, steps = job
    torch.set_num_threads(1)
    return job, train(TASKS[task], method(spec), seed, steps)


def row(job: Job, outcome: SuiteOutcome) -> str:
    """One line of the table."""
    task = TASKS[job[0]]
    arrow = "up" if task.better == "higher" else "down"
    return (
        f"{task.name:28s} {job[1]:24s} {job[2]:4d}  {outcome.validation:9.4g} {outcome.test:9.4g}"
        f"  {outcome.chance:9.4g}  {outcome.final_loss:10.4g} {outcome.seconds:7.1f} {outcome.cpu_seconds:7.1f}"
        f"  {task.metric} ({arrow})  {outcome.failure[:100]}"
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="", help="names with commas between; all open tasks by default")
    parser.add_argument("--sealed", action="store_true", help="without --tasks: all tasks, sealed ones included")
    parser.add_argument("--methods", default="adam:3e-3,ddpnopt")
    parser.add_argument("--seed", default="0", help="one seed, or several with commas between")
    parser.add_argument("--steps", type=int, default=None, help="instead of each task's own number")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--json", type=Path, default=None, help="write all outcomes, loss curves included, to this file"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run every method on every task and print a row as each run ends."""
    options = parse(arguments)
    names = (
        options.tasks.split(",")
        if options.tasks
        else [t.name for t in (TASKS.values() if options.sealed else open_tasks())]
    )
    if unknown := [name for name in names if name not in TASKS]:
        sys.exit(f"unknown tasks: {', '.join(unknown)}; known: {', '.join(TASKS)}")
    specs = options.methods.split(",")
    for spec in specs:
        method(spec)
    jobs = [
        (name, spec, int(seed), options.steps) for name in names for spec in specs for seed in options.seed.split(",")
    ]
    print(
        f"{'task':28s} {'method':24s} {'seed':>4s}  {'validation':>9s} {'test':>9s}  {'chance':>9s}"
        f"  {'train loss':>10s} {'seconds':>7s} {'cpu':>7s}  metric"
    )
    outcomes = []
    # Each process has one thread: set before torch is imported there, so that no pool of threads is started.
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(options.processes, len(jobs))) as pool:
        for job, outcome in pool.imap_unordered(run, jobs):
            print(row(job, outcome), flush=True)
            outcomes.append({"method": job[1], **dataclasses.asdict(outcome)})
            if options.json:
                options.json.write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main()
