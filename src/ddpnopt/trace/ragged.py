"""Samples with unequal numbers of rows: nodes of graphs, points of clouds, tokens one behind the other.

To which sample a row belongs follows from gradients. Let z_i be the output of sample i and v_i any numbers like it. A
row that sample i alone reads has some gradient g of sum_i <v_i, z_i>, and s_i g of sum_i s_i <v_i, z_i>: the factor
tells the sample. Where several samples read a row, there is no such factor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy

import torch
from torch import Tensor

LEVELS = 16  # factors that are told apart: those of 16 samples by one gradient more than the first, of 256 by two
ALIKE = 0.03  # of the largest number in a row: more than rounding errors, less than to the next factor
WEAK = 1e-3  # of the largest number of all rows: what is read may be rounding errors in rows with less

Known = tuple[int, str]
"""Which of the inputs tells the samples of rows, and how."""


class Rows:
    """To which sample each of N rows belongs, in any order."""

    def __init__(self, sample: Tensor, batch: int) -> None:
        self.sample, self.batch = sample, batch
        self.counts = torch.bincount(sample, minlength=batch)  # rows of each sample
        order = sample.argsort(stable=True)
        first = (self.counts.cumsum(0) - self.counts).repeat_interleave(self.counts)
        self.place = torch.empty_like(order)  # of each row among those of its sample
        self.place[order] = torch.arange(len(sample), device=sample.device) - first
        self.places = max(1, int(self.counts.max()))  # of each sample: some are empty

    def backwards(self) -> Rows:
        """The rows of each sample from the last to the first."""
        found = copy(self)
        found.place = self.counts[self.sample] - 1 - self.place
        return found

    def fold(self, a: Tensor) -> Tensor:
        """(N, …) -> (B, places, …), zero in the empty ones."""
        if len(a) != len(self.sample):  # a model that has chosen other rows this time
            a = torch.cat([a[: len(self.sample)], a.new_zeros(max(0, len(self.sample) - len(a)), *a.shape[1:])])
        found = a.new_zeros(self.batch * self.places, *a.shape[1:])
        found = found.index_put((self.sample * self.places + self.place,), a)
        return found.view(self.batch, self.places, *a.shape[1:])

    def sums(self, a: Tensor) -> Tensor:
        """(N, …) -> (B, …): the sum over the rows of each sample."""
        return a.new_zeros(self.batch, *a.shape[1:]).index_add_(0, self.sample, a)


def factors(batch: int) -> list[Tensor]:
    """s_i of all samples, for each gradient: 1, then numbers from 1 to 2 for each digit of i."""
    ids, found = torch.arange(batch), [torch.ones(batch)]
    while batch > 1:
        found.append(1 + (ids % LEVELS) / (LEVELS - 1))
        ids, batch = ids // LEVELS, -(-batch // LEVELS)
    return found


def samples_of(gradients: Sequence[Tensor], batch: int) -> Tensor | None:
    """The sample of each row, from its gradients with these factors, (N, …) each; -1 where a row tells nothing.

    None if several samples read a row.
    """
    plain = gradients[0].reshape(len(gradients[0]), -1)
    plain = plain.to(torch.promote_types(plain.dtype, torch.float32))
    size = plain.abs().amax(1)
    weak, tells = size <= WEAK * size.amax(), size > 0
    size = size.clamp_min(torch.finfo(size.dtype).tiny)[:, None]
    plain = plain / size
    square = torch.linalg.vecdot(plain, plain).clamp_min(1.0)  # but for rows without a gradient it is at least that
    found, unit = torch.zeros_like(tells, dtype=torch.long), 1
    for gradient in gradients[1:]:
        scaled = gradient.reshape(plain.shape).to(plain.dtype) / size
        digit = ((torch.linalg.vecdot(scaled, plain) / square - 1) * (LEVELS - 1)).round()
        off = scaled - (1 + digit / (LEVELS - 1))[:, None] * plain
        tells &= (off.abs().amax(1) <= ALIKE) & (digit >= 0) & (digit < LEVELS)
        found, unit = found + unit * digit.long(), unit * LEVELS
    tells &= found < batch
    return torch.where(tells, found, -1) if bool((tells | weak).all()) else None


def agreeing(a: Tensor, b: Tensor) -> Tensor | None:
    """Both together, where one of them tells; None if they differ where both do."""
    same = bool(((a == b) | (a < 0) | (b < 0)).all())
    return torch.maximum(a, b) if same else None


def filled(sample: Tensor) -> Tensor:
    """Rows that tell nothing belong to the sample of the last one that does, or of the first."""
    known = sample >= 0
    at = torch.where(known, torch.arange(len(sample), device=sample.device), -1).cummax(0).values
    return sample[at.clamp_min(int(known.int().argmax()))]


def told(t: Tensor, rows: int, batch: int, nodes: Tensor | None) -> Iterator[tuple[str, Tensor]]:
    """The samples of so many rows that an input may tell, and how; `nodes`: those of nodes that it may link."""
    if t.dtype == torch.bool and t.dim() > 1 and len(t) == batch:
        found = t.nonzero()[:, 0]
        if len(found) == rows:
            yield "mask", found
    if t.dtype not in (torch.int64, torch.int32) or not t.numel():
        return
    t = t.long()
    least, most = int(t.min()), int(t.max())
    if t.dim() == 1 and len(t) == rows and least >= 0 and most < batch:
        yield "index", t
    if t.dim() == 1 and len(t) in (batch, batch + 1):
        ids = torch.arange(batch, device=t.device)
        bounds = t if len(t) > batch else torch.cat([t, t.new_tensor([rows])])
        lengths = bounds.diff()
        if int(t[0]) == 0 and int(bounds[-1]) == rows and bool((lengths >= 0).all()):
            yield "bounds", ids.repeat_interleave(lengths)
        if len(t) == batch and int(t.sum()) == rows and bool((t >= 0).all()):
            yield "lengths", ids.repeat_interleave(t)
    if nodes is not None and t.shape == (2, rows) and least >= 0 and most < len(nodes):
        yield "links", nodes[t[0]]
