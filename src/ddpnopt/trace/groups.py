"""Samples of a large batch that count as one: as many as the joint system asks for, and in the last group the rest."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ddpnopt.trace.layout import BLOCKS, Layout


@dataclass(frozen=True)
class Groups:
    """Groups of samples that follow each other, in one batch or in several micro-batches."""

    size: int  # of a group
    batches: tuple[int, ...]  # samples of each micro-batch, whose last group has what is left

    @property
    def samples(self) -> int:
        return sum(self.batches)

    @property
    def rows(self) -> int:
        """How many groups there are."""
        return sum(-(-batch // self.size) for batch in self.batches)

    @property
    def layout(self) -> Layout:
        """Of one batch: the last group is filled up with zeros, which have no gradient."""
        return Layout(BLOCKS, self.rows, self.size)

    def add_up(self, a: Tensor) -> Tensor:
        """(B, …), summed over the samples of each group: (rows, …)."""
        found = a.new_zeros(self.rows, *a.shape[1:])
        start = 0
        rows = []
        for batch in self.batches:
            rows.append(torch.arange(batch, device=a.device) // self.size + start)
            start += -(-batch // self.size)
        return found.index_add_(0, torch.cat(rows), a)

    def apart(self, a: Tensor) -> Tensor:
        """The samples again, (B, …), of what the groups have in dimension 1."""
        own = [-(-batch // self.size) for batch in self.batches]
        parts = a.split(own)
        return torch.cat([part.flatten(0, 1)[:batch] for part, batch in zip(parts, self.batches, strict=True)])
