"""The forward sweep with a backtracking line search: lines 7 to 11 of Algorithm 1 until the cost falls as
promised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .backward import Sweep
from .problem import Problem
from .rollout import closed_loop, stage_costs
from .stages import Limits, Run, Trajectory, replace


@dataclass(frozen=True)
class Current:
    """Where each problem stands."""

    trajectory: Trajectory
    cost: Tensor  # (B,)
    scale: Tensor  # (B,): sum of |costs|, what the rounding of `cost` is relative to

    def select(self, index: Tensor) -> Current:
        return Current(self.trajectory.select(index), self.cost[index], self.scale[index])

    def scatter(self, index: Tensor, part: Current) -> Current:
        """Put the problems `index` back among the others."""
        return Current(
            self.trajectory.scatter(index, part.trajectory),
            self.cost.index_copy(0, index, part.cost),
            self.scale.index_copy(0, index, part.scale),
        )


@dataclass(frozen=True)
class Trial:
    """What was found, the old point where no step was accepted; and the step size (B,), 0 there."""

    found: Current
    step: Tensor

    @property
    def accepted(self) -> Tensor:
        return self.step > 0


def line_search(
    problem: Problem,
    runs: Sequence[Run],
    current: Current,
    sweep: Sweep,
    steps: Tensor,
    *,
    sufficient: float,
    limits: Limits | None,
) -> Trial:
    """Largest of the step sizes (A,), falling from 1, that reduces J by `sufficient` times the expected or
    more.

    The full step is tried first for all problems; those that refuse it try all smaller steps at once. So an
    iteration is one or two passes through the dynamics, whatever the step sizes.
    """

    def best(current: Current, sweep: Sweep, steps: Tensor) -> Trial:
        trials = closed_loop(runs, current.trajectory, sweep.k, sweep.K, steps, limits)
        costs = stage_costs(problem, runs, trials)  # (T + 1, A, B)
        return _choose(current, sweep, steps, trials, costs.sum(0), costs.abs().sum(0), sufficient)

    if not bool(sweep.ok.any()):
        none = torch.zeros_like(current.cost)
        return Trial(current, none)
    trial = best(current, sweep, steps[:1])
    again = (~trial.accepted & sweep.ok).nonzero().squeeze(-1)
    if again.numel() == 0 or steps.numel() == 1:
        return trial
    retry = best(current.select(again), sweep.select(again), steps[1:])
    return Trial(trial.found.scatter(again, retry.found), trial.step.index_copy(0, again, retry.step))


def _choose(
    current: Current,
    sweep: Sweep,
    steps: Tensor,
    trials: Trajectory,
    cost: Tensor,
    scale: Tensor,
    sufficient: float,
) -> Trial:
    """Pick for each problem among the A trajectories in `trials`; cost and scale are (A, B)."""
    a = steps[:, None]
    expected = -(a * sweep.linear + 0.5 * a * a * sweep.quadratic)
    # Near the optimum the promised reduction drowns in the rounding of J itself; Newton steps are right
    # there.
    noise = 8 * torch.finfo(cost.dtype).eps * current.scale
    # NaN and infinity compare as false: a trajectory that blew up is never accepted.
    good = (current.cost - cost >= sufficient * expected - noise) & (expected >= 0)
    good = good & sweep.ok & torch.isfinite(scale)
    first = good.to(torch.int8).argmax(0)  # (B,): steps fall, so the first good one is the largest
    some = good.any(0)
    rows = torch.arange(first.shape[0], device=first.device)
    x = replace(some, tuple(block[:, first, rows] for block in trials.x), current.trajectory.x)
    u = replace(some, tuple(block[:, first, rows] for block in trials.u), current.trajectory.u)
    found = Current(
        Trajectory(x, u),
        torch.where(some, cost[first, rows], current.cost),
        torch.where(some, scale[first, rows], current.scale),
    )
    return Trial(found, torch.where(some, steps[first], 0.0))
