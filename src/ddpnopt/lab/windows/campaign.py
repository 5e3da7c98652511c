"""All runs of a benchmark of learning rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ddpnopt.lab.runs.outcome import Outcome
from ddpnopt.lab.windows.contenders import Contender
from ddpnopt.lab.windows.runs import Run
from ddpnopt.lab.windows.tasks import Task
from ddpnopt.lab.windows.windows import Point


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


def promising(runs: Sequence[Run], first: Mapping[Run, Outcome], near: float) -> list[Run]:
    """Of the runs with further seeds those that can matter for a window.

    That is where the first seed came within `near` points of the best of its method, and the default settings.
    """
    accuracies = {run: Point(o.lr, (o,), run.task.chance).accuracy for run, o in first.items()}
    best: dict[tuple[str, str], float] = {}
    for run, accuracy in accuracies.items():
        key = run.task.name, run.contender.name
        best[key] = max(accuracy, best.get(key, 0.0))
    found = []
    for run in runs:
        accuracy = accuracies.get(replace(run, seed=0), 0.0)
        if run.lr is None or accuracy >= best.get((run.task.name, run.contender.name), 0.0) - near:
            found.append(run)
    return found


def _only(rates: list[float], only: Sequence[float] | None) -> list[float]:
    """Those that are asked for; 0.003 means the half decade 0.00316."""
    if only is None:
        return rates
    return [rate for rate in rates if any(abs(rate / wish - 1) < 0.1 for wish in only if wish > 0)]
