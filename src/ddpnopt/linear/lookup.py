"""`nn.Embedding` as a linear map: h = W' e, with e the one-hot row of an id, and its per-sample gradients.

A sample touches few rows. Its gradient is the list of the ids that it has, each with the sum of the output gradients
at the places of that id.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ddpnopt.linear.layer import Layer, Parts, scale_samples
from ddpnopt.linear.metric import Metric
from ddpnopt.linear.sample_gradients import SampleGradients

HELD = 2**22  # numbers held at once in a Gram matrix
GATHERED = 100  # times as long as a multiplication in a matrix product takes one of rows that have to be gathered


@dataclass(frozen=True)
class Lookup(Layer):
    """`nn.Embedding`: the rows of W that the ids name; inputs are integers, (B, …), which never move."""

    weight_shape: tuple[int, ...]  # (ids, numbers per row)
    padding_idx: int | None = None  # the id whose row is not trained
    bias: bool = False
    groups: int = 1
    feature_dims: ClassVar[tuple[int | None, int | None]] = (None, -1)

    def outer_factors(self, xi: Tensor | None, psi: Tensor | None) -> Parts:
        assert psi is not None
        return [psi]

    @property
    def _padding(self) -> int:
        return -1 if self.padding_idx is None else self.padding_idx

    def apply(self, x: Tensor, u: Parts) -> Tensor:
        h = F.embedding(x, u[0])
        return h if self.padding_idx is None else h * (x != self.padding_idx)[..., None]

    def input_grad(self, v: Tensor, weight: Tensor, x_shape: torch.Size) -> Tensor:
        return v.new_zeros(x_shape)

    def grad(self, x: Tensor, v: Tensor) -> Parts:
        return [_sum_rows(v, x, self.weight_shape[0], self._padding)]

    def patches(self, x: Tensor) -> Tensor:
        ids = x.reshape(len(x), -1, 1)
        rows = F.one_hot(ids, self.weight_shape[0]) * (ids != self._padding)[..., None]
        return rows.to(torch.get_default_dtype())

    def rows(self, h: Tensor) -> Tensor:
        return h.reshape(len(h), -1, 1, h.shape[-1])

    def unrows(self, rows: Tensor) -> Tensor:
        return rows.flatten(1)

    def together(self, uses: list[Tensor]) -> Tensor:
        if uses[0].is_floating_point():
            return torch.cat([use.reshape(len(use), -1, use.shape[-1]) for use in uses], 1)
        return torch.cat([use.reshape(len(use), -1) for use in uses], 1)

    def join(self, u: Parts) -> Tensor:
        return u[0].mT[..., None, :, :]

    def split(self, joint: Tensor) -> Parts:
        return [joint.squeeze(-3).mT]

    @property
    def joint_shape(self) -> tuple[int, int, int]:
        return 1, self.weight_shape[1], self.weight_shape[0]

    def form_over_places(self, x: Tensor, p: Tensor, others: int, recompute: bool | None) -> None:
        return None

    def sample_gradients(
        self, x: Tensor, p: Tensor, *, others: int = 1, recompute: bool | None = None
    ) -> SampleGradients:
        return RowsOfIds(self, x, p)


def _sum_rows(v: Tensor, ids: Tensor, n: int, padding: int = -1) -> Tensor:
    """The sum of v over the places of each id: (…, d), (…) -> (n, d)."""
    found: Tensor = torch.ops.aten.embedding_dense_backward(v.contiguous(), ids.contiguous(), n, padding, False)
    return found


class RowsOfIds:
    """P_u of an embedding: pairs of a sample and an id, each with one row; only diagonal metrics apply."""

    def __init__(self, layer: Lookup, x: Tensor, p: Tensor) -> None:
        self.layer, self.samples = layer, len(x)
        keys = x.reshape(len(x), -1) * len(x) + torch.arange(len(x), device=x.device)[:, None]
        pairs, self._inverse = torch.unique(keys, return_inverse=True)
        self.id, self.sample = pairs // len(x), pairs % len(x)  # (N,) each, sorted by the id
        self._trained = self.id != layer._padding
        self.values = self._values(p)  # (N, d)

    def _values(self, p: Tensor) -> Tensor:
        rows = _sum_rows(p.reshape(*self._inverse.shape, p.shape[-1]), self._inverse, len(self.id))
        return rows if self.layer.padding_idx is None else rows * self._trained[:, None]

    def _scaled(self, metric: Metric) -> Tensor:
        """sqrt(M^-1) p_u."""
        if metric.T_A is not None or metric.inverse is not None:
            raise TypeError("an embedding has no Kronecker factors")
        return self.values if metric.D is None else self.values * metric.D[0][self.id].sqrt()

    def dots(self, metric: Metric, p: Tensor | None = None) -> Tensor:
        if metric.T_A is not None or metric.inverse is not None:
            raise TypeError("an embedding has no Kronecker factors")
        left = self.values if metric.D is None else self.values * metric.D[0][self.id]
        found = torch.linalg.vecdot(left, self.values if p is None else self._values(p))
        return found.new_zeros(self.samples).index_add_(0, self.sample, found)

    def gram(self, metric: Metric, other: RowsOfIds | None = None) -> Tensor:
        those = self if other is None else other
        left = self._scaled(metric)
        right = left if other is None else other._scaled(metric)
        first, last = (torch.searchsorted(those.id, self.id, right=after) for after in (False, True))
        met = last - first  # rows of the same id, for each row
        total, distinct = int(met.sum()), len(torch.unique_consecutive(self.id))
        if GATHERED * total <= self.samples * those.samples * distinct:  # few ids per sample, or none
            return self._over_meetings(left, right, those, first, met, total)
        return self._over_ids(left, right, those)

    def _over_meetings(
        self, left: Tensor, right: Tensor, those: RowsOfIds, first: Tensor, met: Tensor, total: int
    ) -> Tensor:
        """The inner products of all `total` pairs of rows with the same id, each added to that of its samples."""
        found = left.new_zeros(self.samples * those.samples)
        shift, some = first + met - met.cumsum(0), max(1, HELD // left.shape[1])
        one = torch.repeat_interleave(met, output_size=total)
        for start in range(0, total, some):
            i = one[start : start + some]
            j = torch.arange(start, start + len(i), device=i.device) + shift[i]
            at = self.sample[i] * those.samples + those.sample[j]
            found.index_add_(0, at, torch.linalg.vecdot(left[i], right[j]))
        return found.view(self.samples, -1)

    def _over_ids(self, left: Tensor, right: Tensor, those: RowsOfIds) -> Tensor:
        """A product of explicit rows, some ids at a time."""
        if those is self:
            mine = theirs = torch.unique_consecutive(self.id, return_inverse=True)[1]
        else:
            positions = torch.unique(torch.cat([self.id, those.id]), return_inverse=True)[1]
            mine, theirs = positions.split([len(self.id), len(those.id)])
        count = 1 + int(torch.maximum(mine[-1], theirs[-1]))
        K = left.new_zeros(self.samples, those.samples)
        some = max(1, HELD // ((self.samples + those.samples) * left.shape[1]))  # ids at once
        for start in range(0, count, some):
            n = min(some, count - start)
            dense = _dense if n == count else _dense_part  # mostly all at once
            a = dense(left, self.sample, mine - start, self.samples, n)
            b = a if those is self else dense(right, those.sample, theirs - start, those.samples, n)
            K.addmm_(a, b.T)
        return K

    def combine(self, w: Tensor) -> Parts:
        values = scale_samples(w[self.sample], self.values)
        return [values.new_zeros(self.layer.weight_shape).index_add_(0, self.id, values)]

    def solved(self, w: Tensor, metric: Metric) -> Parts:
        return metric.solve(self.layer, self.combine(w))

    def add_to(self, u: list[Tensor], w: Tensor, alpha: float) -> None:
        u[0].index_add_(0, self.id, scale_samples(w[self.sample], self.values), alpha=alpha)


def _dense(values: Tensor, sample: Tensor, position: Tensor, samples: int, n: int) -> Tensor:
    """The rows of n ids explicitly, each at its position: (samples, n d)."""
    found = values.new_zeros(samples * n, values.shape[1])
    return found.index_copy_(0, sample * n + position, values).view(samples, -1)


def _dense_part(values: Tensor, sample: Tensor, position: Tensor, samples: int, n: int) -> Tensor:
    """The same of the ids at positions 0 … n-1 alone."""
    here = (position >= 0) & (position < n)
    return _dense(values[here], sample[here], position[here], samples, n)
