"""How trajectories are stored: runs of equal stages, stacked.

Convention of the whole package: a *run* is a maximal stretch of consecutive stages with the same functions
and the same sizes. Everything that exists per stage is kept as one tensor per run, (S, B, ...), S stages by B
problems; such a tuple of tensors is called `Blocks`. An ordinary control problem is one run, so its
derivatives at all stages of all problems are one vmap call; a network with a different function in each layer
is T runs of one stage. States have one block more than controls: the terminal state, (1, B, n_T).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from .problem import Problem, StageFunction

Blocks = tuple[Tensor, ...]


@dataclass(frozen=True)
class Run:
    """Stages start .. stop - 1 share f, l and the sizes of state, control and next state."""

    start: int
    stop: int
    f: StageFunction
    l: StageFunction
    n: int
    m: int
    n_next: int

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Limits:
    """Control limits, one tensor (S, 1, m) per run; broadcast over the problems."""

    lower: Blocks
    upper: Blocks

    def stages(self) -> list[tuple[Tensor, Tensor]]:
        """Lower and upper limit of each stage, (1, m_t)."""
        return list(zip(unstack(self.lower), unstack(self.upper), strict=True))


@dataclass(frozen=True)
class Trajectory:
    """States x_0 .. x_T and controls u_0 .. u_{T-1} of B problems, as blocks."""

    x: Blocks  # (S, B, n) per run, and (1, B, n_T)
    u: Blocks  # (S, B, m) per run

    def select(self, index: Tensor) -> Trajectory:
        return Trajectory(select(self.x, index), select(self.u, index))

    def scatter(self, index: Tensor, part: Trajectory) -> Trajectory:
        return Trajectory(scatter(self.x, index, part.x), scatter(self.u, index, part.u))


def plan(problem: Problem, n: Sequence[int], m: Sequence[int]) -> tuple[Run, ...]:
    """Group the stages into runs; n has T + 1 sizes, m has T."""

    def key(t: int) -> tuple[int, int, int, int, int]:
        # id(), not ==: a callable module or a tensor-carrying functor may define equality strangely
        return id(problem.f(t)), id(problem.l(t)), n[t], m[t], n[t + 1]

    runs = []
    for _, group in groupby(range(problem.T), key):
        stages = list(group)
        t = stages[0]
        runs.append(Run(t, stages[-1] + 1, problem.f(t), problem.l(t), n[t], m[t], n[t + 1]))
    return tuple(runs)


def stack(runs: Sequence[Run], stages: Sequence[Tensor]) -> Blocks:
    """Per-stage tensors (B, ...) to blocks; a tensor beyond the last stage becomes a block of its own."""
    blocks = [torch.stack(list(stages[run.start : run.stop])) for run in runs]
    blocks += [last.unsqueeze(0) for last in stages[runs[-1].stop :]]
    return tuple(blocks)


def unstack(blocks: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Blocks to per-stage views (B, ...)."""
    return tuple(stage for block in blocks for stage in block.unbind(0))


def select(blocks: Blocks, index: Tensor) -> Blocks:
    """Keep the problems in `index`."""
    return tuple(block.index_select(1, index) for block in blocks)


def replace(mask: Tensor, new: Blocks, old: Blocks) -> Blocks:
    """Problem by problem: new where the mask (B,) is true."""
    return tuple(torch.where(_on_problems(mask, o), n, o) for n, o in zip(new, old, strict=True))


def scatter(blocks: Blocks, index: Tensor, new: Blocks) -> Blocks:
    """Put the problems `index` back into the full batch."""
    return tuple(block.index_copy(1, index, n) for block, n in zip(blocks, new, strict=True))


def over_batch(function: Callable[..., Tensor], *arguments: Tensor) -> Tensor:
    """Apply a function of vectors to tensors (..., size) with any equal leading dimensions."""
    leading = arguments[0].shape[:-1]
    flat = [argument.reshape(-1, argument.shape[-1]) for argument in arguments]
    out = torch.func.vmap(function)(*flat)
    return out.reshape(leading + out.shape[1:])


def _on_problems(mask: Tensor, like: Tensor) -> Tensor:
    return mask.reshape(1, -1, *([1] * (like.dim() - 2)))
