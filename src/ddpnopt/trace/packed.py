"""Packed sequences of unequal length as padded ones, in the order of the batch, and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ddpnopt.trace.ragged import Rows


class Packing:
    """Where the rows of a packed sequence belong: sample, time, and the same with each sequence reversed."""

    def __init__(self, packed: PackedSequence) -> None:
        sizes, device = packed.batch_sizes, packed.data.device
        self.batch, self.times = int(sizes[0]), len(sizes)
        self.order, self.back = packed.sorted_indices, packed.unsorted_indices
        rank = torch.cat([torch.arange(int(n)) for n in sizes]).to(device)  # in the order of falling lengths
        sample = rank if self.order is None else self.order[rank]
        self.rows = Rows(sample, self.batch)  # in the order of time
        self.reversed, self.lengths = self.rows.backwards(), self.rows.counts
        self.padding = torch.arange(self.times, device=device)[:, None] >= self.lengths  # (T, B)

    @staticmethod
    def of(args: tuple[Any, ...]) -> Packing | None:
        """That of the input of a recurrent module, if it is packed."""
        return Packing(args[0]) if args and isinstance(args[0], PackedSequence) else None

    def _rows(self, *, reverse: bool) -> Rows:
        return self.reversed if reverse else self.rows

    def pad(self, rows: Tensor, *, reverse: bool) -> Tensor:
        """(rows, n) -> (B, T, n), zero behind the end of each sequence."""
        return self._rows(reverse=reverse).fold(rows)

    def pack(self, padded: Tensor, *, reverse: bool) -> Tensor:
        """(T, B, n) -> (rows, n)."""
        rows = self._rows(reverse=reverse)
        return padded[rows.place, rows.sample]

    def last(self, padded: Tensor) -> Tensor:
        """The last of each sequence: (T, B, n) -> (B, n)."""
        return padded[self.lengths - 1, torch.arange(self.batch, device=padded.device)]

    def of_batch(self, state: Tensor) -> Tensor:
        """Initial states, (layers, B, n), in the order of the batch."""
        return state if self.back is None else state.index_select(1, self.back)

    def by_length(self, state: Tensor) -> Tensor:
        """Last states as the fused call returns them."""
        return state if self.order is None else state.index_select(1, self.order)
