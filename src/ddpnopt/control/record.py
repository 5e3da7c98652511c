"""Book-keeping of a solve: who ended how, and the history of all problems, running or not."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from .inputs import Start
from .problem import Problem
from .search import Trial
from .solution import History, Solution, Status
from .stages import Blocks, Trajectory, unstack


class Ending(IntEnum):
    """Codes of `Status`, for masks."""

    RUNNING = 0
    GRADIENT = 1
    COST = 2
    NO_STEP = 3


STATUS = {
    Ending.RUNNING: Status.MAX_ITERATIONS,
    Ending.GRADIENT: Status.GRADIENT,
    Ending.COST: Status.COST,
    Ending.NO_STEP: Status.NO_STEP,
}


@dataclass
class IterationRecorder:
    """Current values of the whole batch, (B,) each, and the rows of the history."""

    cost: Tensor
    norm: Tensor
    mu: Tensor
    ending: Tensor
    iterations: Tensor
    rows: list[tuple[Tensor, Tensor, Tensor, Tensor]]

    @classmethod
    def start(cls, cost: Tensor) -> IterationRecorder:
        zeros = torch.zeros_like(cost)
        counts = torch.zeros_like(cost, dtype=torch.long)
        return cls(cost.clone(), zeros, zeros.clone(), counts, counts.clone(), [])

    def begin(self, ids: Tensor, norm: Tensor, mu: Tensor) -> None:
        """Gradient norm and damping of the running problems before an iteration."""
        self.norm = self.norm.index_copy(0, ids, _without_nan(norm))
        self.mu = self.mu.index_copy(0, ids, mu)

    def step(self, ids: Tensor, trial: Trial) -> None:
        """What the line search of the running problems found; this completes the row."""
        step = torch.zeros_like(self.cost).index_copy(0, ids, trial.step)
        self.rows.append((self.cost, self.norm, self.mu, step))
        self.cost = self.cost.index_copy(0, ids, trial.found.cost)
        self.iterations = self.iterations.index_add(0, ids, torch.ones_like(ids))

    def end(self, ids: Tensor, ending: Ending) -> None:
        self.ending[ids] = int(ending)

    def is_ending(self, ending: Ending) -> Tensor:
        return self.ending == int(ending)

    def finish(self, norm: Tensor, grad_tol: float) -> None:
        """The last row. A problem whose last allowed step brought it to the optimum has converged."""
        self.norm = _without_nan(norm)
        arrived = self.is_ending(Ending.RUNNING) & (self.norm <= grad_tol * self.cost.abs().clamp(min=1))
        self.ending[arrived] = int(Ending.GRADIENT)
        self.rows.append((self.cost, self.norm, self.mu, torch.zeros_like(self.cost)))


def solution(
    problem: Problem, start: Start, trajectory: Trajectory, k: Blocks, K: Blocks, recorder: IterationRecorder
) -> Solution:
    """Blocks to per-stage tensors; the batch dimension goes if the user gave none."""
    statuses = tuple(STATUS[Ending(code)] for code in recorder.ending.tolist())
    columns = [torch.stack(column) for column in zip(*recorder.rows, strict=True)]  # (I + 1, B) each
    stages = [unstack(blocks) for blocks in (trajectory.x, trajectory.u, k, K)]
    cost, norm, iterations = recorder.cost, recorder.norm, recorder.iterations
    limits = None
    if start.limits is not None:
        limits = tuple((lo.squeeze(0), hi.squeeze(0)) for lo, hi in start.limits.stages())
    if not start.batched:
        columns = [column.squeeze(-1) for column in columns]
        stages = [tuple(stage.squeeze(0) for stage in group) for group in stages]
        cost, norm, iterations = cost[0], norm[0], iterations[0]
    return Solution(
        x=stages[0],
        u=stages[1],
        k=stages[2],
        K=stages[3],
        cost=cost,
        gradient_norm=norm,
        iterations=iterations,
        status=statuses if start.batched else statuses[0],
        history=History(*columns),
        problem=problem,
        limits=limits,
    )


def _without_nan(norm: Tensor) -> Tensor:
    return torch.where(torch.isnan(norm), torch.inf, norm)
