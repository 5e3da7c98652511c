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
from .stages import Limits, Run, Trajectory, replace, scatter, select


@dataclass(frozen=True)
class Trial:
    """The trajectory found for each problem (the old one where none was accepted), its cost, and how it was
    found."""

    trajectory: Trajectory
    cost: Tensor  # (B,)
    scale: Tensor  # (B,): sum of |costs|, what the rounding of `cost` is relative to
    step: Tensor  # (B,): accepted step size, 0 where none was
    expected: Tensor  # (B,): reduction the quadratic model promised for that step

    @property
    def accepted(self) -> Tensor:
        return self.step > 0


def line_search(
    problem: Problem,
    runs: Sequence[Run],
    nominal: Trajectory,
    cost: Tensor,
    scale: Tensor,
    sweep: Sweep,
    steps: Tensor,
    *,
    sufficient: float,
    limits: Limits | None,
) -> Trial:
    """Largest of the step sizes (A,), falling from 1, whose reduction is at least `sufficient` times the
    expected one.

    The full step is tried first for all problems; those that refuse it try all smaller steps at once. So an
    iteration is one or two passes through the dynamics, whatever the step sizes.
    """
    if not bool(sweep.ok.any()):
        none = torch.zeros_like(cost)
        return Trial(nominal, cost, scale, none, none)
    trial = _best(problem, runs, nominal, cost, scale, sweep, steps[:1], sufficient, limits)
    again = (~trial.accepted & sweep.ok).nonzero().squeeze(-1)
    if again.numel() == 0 or steps.numel() == 1:
        return trial
    part = Sweep(
        select(sweep.k, again),
        select(sweep.K, again),
        sweep.linear[again],
        sweep.quadratic[again],
        sweep.ok[again],
    )
    retry = _best(
        problem, runs, nominal.select(again), cost[again], scale[again], part, steps[1:], sufficient, limits
    )
    return _merge(trial, again, retry)


def _best(
    problem: Problem,
    runs: Sequence[Run],
    nominal: Trajectory,
    cost: Tensor,
    scale: Tensor,
    sweep: Sweep,
    steps: Tensor,
    sufficient: float,
    limits: Limits | None,
) -> Trial:
    trials = closed_loop(runs, nominal, sweep.k, sweep.K, steps, limits)
    costs = stage_costs(problem, runs, trials)  # (T + 1, A, B)
    new_cost, new_scale = costs.sum(0), costs.abs().sum(0)  # (A, B)
    a = steps[:, None]
    expected = -(a * sweep.linear + 0.5 * a * a * sweep.quadratic)
    # Near the optimum the promised reduction drowns in the rounding of the cost itself; Newton steps are
    # right there.
    noise = 8 * torch.finfo(cost.dtype).eps * scale
    # NaN and infinity compare as false: a trajectory that blew up is never accepted.
    good = (cost - new_cost >= sufficient * expected - noise) & (expected >= 0) & sweep.ok
    good = good & torch.isfinite(new_scale)
    first = good.to(torch.int8).argmax(0)  # (B,): steps fall, so the first good one is the largest
    some = good.any(0)
    rows = torch.arange(cost.shape[0], device=cost.device)
    chosen = Trajectory(
        tuple(block[:, first, rows] for block in trials.x), tuple(block[:, first, rows] for block in trials.u)
    )
    return Trial(
        Trajectory(replace(some, chosen.x, nominal.x), replace(some, chosen.u, nominal.u)),
        torch.where(some, new_cost[first, rows], cost),
        torch.where(some, new_scale[first, rows], scale),
        torch.where(some, steps[first], 0.0),
        torch.where(some, expected[first, rows], 0.0),
    )


def _merge(trial: Trial, index: Tensor, part: Trial) -> Trial:
    """Put the retried problems back among the others."""
    x = scatter(trial.trajectory.x, index, part.trajectory.x)
    u = scatter(trial.trajectory.u, index, part.trajectory.u)
    return Trial(
        Trajectory(x, u),
        trial.cost.index_copy(0, index, part.cost),
        trial.scale.index_copy(0, index, part.scale),
        trial.step.index_copy(0, index, part.step),
        trial.expected.index_copy(0, index, part.expected),
    )
