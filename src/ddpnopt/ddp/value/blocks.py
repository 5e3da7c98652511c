"""The batch-coupled form for a large batch, in blocks: its cost grows with B, not with B^2 or B^3.

Samples are coupled within a block exactly. The other blocks are assumed to act like this one: with n blocks

    S w  ~  n S_bb w_b          so that          w_b = (I + n L S_bb)^-1 (v_T + L c)

which is exact for identical blocks, and always the average of what each block would do if it were the whole batch.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ddpnopt.ddp.stage import Direction, Displacement, Policy, Stage
from ddpnopt.ddp.value.batch import Batch
from ddpnopt.linear.layer import Parts
from ddpnopt.linear.metric import Metric
from ddpnopt.linear.sample_gradients import Sums

LARGEST = 512  # samples in a block: up to here the algebra on B x B matrices is cheap compared with the passes


class Blocks:
    """Joint value functions of the blocks of a batch, each of which represents the whole."""

    def __init__(self, L: Tensor, v: Tensor, displacement: Displacement, columns: int = 1, dof: float = 1.0) -> None:
        self.columns, self.displacement = columns, displacement
        B = len(L) // columns
        n = -(-B // LARGEST)
        self.sizes = [B * (k + 1) // n - B * k // n for k in range(n)]
        pairs = zip(self._split(L), self._split(v), strict=True)
        self.blocks = [Batch(n * l_b, v_b, displacement, columns, dof=dof) for l_b, v_b in pairs]

    def _split(self, a: Tensor) -> list[Tensor]:
        """(R B, …) -> (R b, …) of each block."""
        return [part.flatten(0, 1) for part in a.unflatten(0, (self.columns, -1)).split(self.sizes, dim=1)]

    def _stages(self, stage: Stage) -> list[Stage]:
        """The stage as each block sees it; the stage cost counts once, so each has a fraction of it."""
        n = len(self.sizes)
        l_u = None if stage.l_u is None else [part / n for part in stage.l_u]
        xs = stage.x.split(self.sizes)
        p_hs = zip(*(p.split(self.sizes) for p in stage.p_h), strict=True)
        return [
            replace(stage, x=x, p_h=list(p_h), p_x=[None] * len(p_h), l_u=l_u) for x, p_h in zip(xs, p_hs, strict=True)
        ]

    def v_h(self, stage: Stage) -> Tensor:
        return torch.cat([block.v_h(own) for block, own in zip(self.blocks, self._stages(stage), strict=True)])

    def gradient(self, stage: Stage) -> Parts:
        return stage.layer.grad(stage.x, self.v_h(stage))

    def prepare(self, stage: Stage) -> None:
        return

    def backward(self, stage: Stage, metric: Metric) -> Policy:
        made = [block.couple(own, metric) for block, own in zip(self.blocks, self._stages(stage), strict=True)]
        gradients = Several([g for g, _ in made], [size * self.columns for size in self.sizes])
        solvers = [solve for _, solve in made]
        n = len(solvers)

        def policy(x_hat: Tensor | None) -> Direction:
            c = self.displacement.at(stage, x_hat)
            parts = [None] * n if c is None else [part / n for part in self._split(c)]
            w = torch.cat([solve(part) for solve, part in zip(solvers, parts, strict=True)])
            return Direction(None, gradients, w, stage.l_u)

        return policy

    @property
    def guarded_fraction(self) -> float:
        return 0.0

    def predicted(self) -> float | None:
        return len(self.blocks) * sum(block.predicted() or 0.0 for block in self.blocks)


class Several:
    """The gradients of several groups of samples, concatenated."""

    def __init__(self, groups: list[Sums], sizes: list[int]) -> None:
        self.groups, self.sizes = groups, sizes

    def combine(self, w: Tensor) -> Parts:
        parts = [group.combine(own) for group, own in zip(self.groups, w.split(self.sizes), strict=True)]
        return [torch.stack(same).sum(0) for same in zip(*parts, strict=True)]

    def solved(self, w: Tensor, metric: Metric) -> Parts:
        parts = [group.solved(own, metric) for group, own in zip(self.groups, w.split(self.sizes), strict=True)]
        return [torch.stack(same).sum(0) for same in zip(*parts, strict=True)]

    def add_to(self, u: list[Tensor], w: Tensor, alpha: float) -> None:
        for group, own in zip(self.groups, w.split(self.sizes), strict=True):
            group.add_to(u, own, alpha)
