"""The one search over learning rates: a grid, judged on held-out training data; the test set is not touched.

How the runs are computed is left to the caller: directly, or through a store and several processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from ddpnopt.lab.errors import ExperimentError
from ddpnopt.lab.methods.registry import method
from ddpnopt.lab.runs.config import RunConfig
from ddpnopt.lab.runs.outcome import Outcome
from ddpnopt.lab.runs.task import Evaluation, Task

Compute = Callable[[Sequence[RunConfig]], Sequence[Outcome]]
"""Computes runs; the outcomes are in the order of the configurations."""


@dataclass(frozen=True)
class Candidate:
    """A configuration and what it reached on the held-out data, averaged over the seeds."""

    config: RunConfig
    metric: float
    train_loss: float

    @property
    def order(self) -> tuple[float, float]:
        """Lower is better. Accuracies of a small set come in steps: the training loss decides between equal ones."""
        sign = -1 if self.config.task.higher_is_better else 1
        return sign * self.metric, self.train_loss


def candidates(base: RunConfig, points: int | None = None) -> list[RunConfig]:
    """The configurations to try: the method's grid, or `points` rates evenly in the logarithm over its range.

    Momentum m multiplies a step by up to 1 / (1 - m): there the range is that of the whole step. None where there is
    nothing to tune.
    """
    chosen = method(base.method)
    if points is None:
        return [replace(base, lr=lr) for lr in chosen.grid]
    if chosen.search_range is None:
        return []
    low, high = chosen.search_range
    steps = max(points - 1, 1)
    rates = [float(f"{low * (high / low) ** (i / steps):.3g}") for i in range(points)]
    if not chosen.momenta:
        return [replace(base, lr=lr) for lr in rates]
    return [
        replace(base, lr=float(f"{lr * (1 - m):.3g}"), options={**base.options, "momentum": m})
        for lr in rates
        for m in chosen.momenta
    ]


def search(
    grids: Sequence[Sequence[RunConfig]], seeds: int, compute: Compute, *, validation: bool = True
) -> list[list[Candidate]]:
    """Every grid with its candidates, best first; an empty grid has none. All runs are computed in one call.

    Without `validation` they are judged by the task's own metric, for tasks that hold no data out.
    """
    wanted = [
        replace(config, seed=seed, validation=validation) for grid in grids for config in grid for seed in range(seeds)
    ]
    found = iter(compute(wanted))
    ranked = []
    for grid in grids:
        tried = [_candidate(config, [next(found) for _ in range(seeds)]) for config in grid]
        ranked.append(sorted(tried, key=lambda each: each.order))
    return ranked


def best_rate(base: RunConfig, compute: Compute, *, seeds: int = 1) -> RunConfig:
    """The configuration with the best learning rate of the method's grid."""
    grid = candidates(base)
    if not grid:
        raise ExperimentError(f"{base.method} has no learning rates to search")
    return replace(search([grid], seeds, compute)[0][0].config, seed=base.seed, validation=base.validation)


def counted(outcome: Outcome, task: Task) -> Evaluation:
    """Training loss and metric of a run; a run that diverged counts as an untrained model."""
    return task.untrained if outcome.diverged else Evaluation(outcome.train_loss, outcome.metric)


def _candidate(config: RunConfig, outcomes: Sequence[Outcome]) -> Candidate:
    counts = [counted(outcome, config.task) for outcome in outcomes]
    return Candidate(config, fmean(each.metric for each in counts), fmean(each.loss for each in counts))
