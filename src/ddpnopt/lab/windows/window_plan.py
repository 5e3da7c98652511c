"""All runs of a benchmark of learning rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ddpnopt.lab.methods.method import Method
from ddpnopt.lab.runs.config import RunConfig
from ddpnopt.lab.runs.outcome import Outcome
from ddpnopt.lab.runs.search import counted
from ddpnopt.lab.runs.task import Task


def plan(
    tasks: Sequence[Task], methods: Sequence[Method], seeds: int, points: int, only: Sequence[float] | None
) -> list[RunConfig]:
    """Every run, in an order that makes a part of them useful: seed by seed, and the methods in turn."""
    runs = []
    for seed in range(seeds):
        for task in tasks:
            rates = {m.name: _only(m.window_rates(points), only) for m in methods}
            runs += [RunConfig(m.name, task, seed=seed) for m in methods]
            for position in range(points):
                runs += [
                    RunConfig(m.name, task, rates[m.name][position], seed=seed)
                    for m in methods
                    if position < len(rates[m.name])
                ]
    return runs


def promising(runs: Sequence[RunConfig], first: Mapping[RunConfig, Outcome], near: float) -> list[RunConfig]:
    """Of the runs with further seeds those that can matter for a window.

    That is where the first seed came within `near` points of the best of its method, and the default settings.
    """
    accuracies = {run: counted(outcome, run.task).metric for run, outcome in first.items()}
    best: dict[tuple[str, str], float] = {}
    for run, accuracy in accuracies.items():
        key = run.task.name, run.method
        best[key] = max(accuracy, best.get(key, 0.0))
    found = []
    for run in runs:
        accuracy = accuracies.get(replace(run, seed=0), 0.0)
        if run.lr is None or accuracy >= best.get((run.task.name, run.method), 0.0) - near:
            found.append(run)
    return found


def _only(rates: list[float], only: Sequence[float] | None) -> list[float]:
    """Those that are asked for; 0.003 means the half decade 0.00316."""
    if only is None:
        return rates
    return [rate for rate in rates if any(abs(rate / wish - 1) < 0.1 for wish in only if wish > 0)]
