"""Where the samples of a batch are in a tensor, if not in dimension 0."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ddpnopt.linear.convolution import Conv
from ddpnopt.linear.elementwise import ScaleShift
from ddpnopt.linear.layer import Layer
from ddpnopt.trace.ragged import Rows

BLOCKS = "blocks"  # dimension 0 has k entries of sample 0, then k of sample 1, …: windows, frames, flattened tokens
INTERLEAVED = "interleaved"  # … the first entry of each sample, then the second of each, …
SECOND = "second"  # dimension 1 has the samples: sequence-first
SINGLE = "single"  # no dimension for the batch: one sample
RAGGED = "ragged"  # dimension 0 has the entries of all samples in any order, of some more than of others


@dataclass(frozen=True)
class Layout:
    """An arrangement of `batch` samples."""

    kind: str
    batch: int
    size: int = 0  # of a block; zero: all are equal, else the last may have less
    rows: Rows | None = field(default=None, compare=False)  # of a ragged one

    def fold(self, a: Tensor) -> Tensor:
        """(B, …), with what a sample has several of in dimension 1."""
        if self.rows is not None:
            return self.rows.fold(a)
        if self.kind == SECOND:
            return a.movedim(1, 0)
        if self.kind == SINGLE:
            return a[None]
        if self.kind == BLOCKS:
            missing = self.size and self.batch * self.size - len(a)
            if missing:
                a = torch.cat([a, a.new_zeros(missing, *a.shape[1:])])
            return a.reshape(self.batch, -1, *a.shape[1:])
        return a.reshape(-1, self.batch, *a.shape[1:]).movedim(1, 0)

    def sums(self, a: Tensor) -> Tensor:
        """(B, …): the sum over what a sample has several of."""
        return self.fold(a).sum(1) if self.rows is None else self.rows.sums(a)

    def places(self, layer: Layer, a: Tensor) -> Tensor:
        """An input or output of a layer as (B, …), with further places in the dimension where the layer has them."""
        found = self.fold(a)
        if self.kind == SINGLE:
            return found
        channels_first = isinstance(layer, ScaleShift) and layer.channels_first
        return found.movedim(1, 2) if channels_first and found.dim() > 2 else found

    def fits(self, layer: Layer | None, a: Tensor) -> bool:
        """Whether a tensor may be arranged in this way."""
        if self.kind != SECOND:
            return a.dim() > 0 and len(a) > 0 and len(a) % self.batch == 0
        features = 0 if layer is None else len(layer.weight_shape) if isinstance(layer, ScaleShift) else 1
        if isinstance(layer, Conv) or (isinstance(layer, ScaleShift) and layer.channels_first):
            return False  # their dimension 1 has the channels
        return a.dim() >= 2 + features - (not a.is_floating_point()) and a.shape[1] == self.batch
