"""Running the dynamics forward: with given controls, or with the feedback policy of Eq. (4)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.func import vmap

from .problem import Problem
from .stages import Blocks, Limits, Run, Trajectory, over_batch, stack, unstack


def simulate(runs: Sequence[Run], x0: Tensor, u: Blocks) -> Trajectory:
    """x_{t+1} = f_t(x_t, u_t) from x0 (B, n_0)."""
    x = [x0]
    for run, block in zip(runs, u, strict=True):
        f = vmap(run.f)
        for u_t in block.unbind(0):
            x.append(f(x[-1], u_t))
    return Trajectory(stack(runs, x), u)


def stage_costs(problem: Problem, runs: Sequence[Run], trajectory: Trajectory) -> Tensor:
    """l_0 .. l_{T-1} and phi: (T + 1, ..., B), whatever lies between stage and problem in the blocks."""
    costs = [over_batch(run.l, x, u) for run, x, u in zip(runs, trajectory.x, trajectory.u, strict=False)]
    costs.append(over_batch(problem.terminal_cost, trajectory.x[-1]))
    return torch.cat(costs)


def closed_loop(
    runs: Sequence[Run], nominal: Trajectory, k: Blocks, K: Blocks, step: Tensor, limits: Limits | None
) -> Trajectory:
    """Lines 7 to 11 of Algorithm 1 for several step sizes at once.

    u = u_t + step * k_t + K_t (x - x_t), clipped to the limits, from x_0. `step` is (A,); the blocks of the
    result are (S, A, B, ...): all A trajectories of all B problems go through the dynamics together, because
    the loop over stages costs the same for one of them as for all.
    """
    A = step.shape[0]
    bounds = limits.stages() if limits is not None else None
    references, controls = unstack(nominal.x), unstack(nominal.u)
    opens, gains = unstack(k), unstack(K)
    x = [references[0].expand(A, -1, -1)]  # (A, B, n_0)
    u = []
    for run in runs:
        for t in range(run.start, run.stop):
            dx = x[-1] - references[t]
            feedback = torch.einsum("bmn,abn->abm", gains[t], dx)
            u_t = controls[t] + step[:, None, None] * opens[t] + feedback
            if bounds is not None:
                u_t = u_t.clamp(*bounds[t])
            u.append(u_t)
            x.append(over_batch(run.f, x[-1], u_t))
    return Trajectory(stack(runs, x), stack(runs, u))
