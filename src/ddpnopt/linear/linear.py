"""`nn.Linear` as a linear map, and its per-sample gradients on (B, n) inputs, which have rank one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ddpnopt.linear.layer import Layer, Parts, in_precision, scale_samples
from ddpnopt.linear.metric import Metric
from ddpnopt.linear.sample_gradients import ByPlaces, Explicit, SampleGradients

SAMPLES = 512  # taken together in an update
CHUNK = 2**24  # numbers held at once where a Gram matrix goes through explicit gradients


@dataclass(frozen=True)
class Linear(Layer):
    """`nn.Linear`: h = W x + b on the last dimension, with any dimensions between it and the batch."""

    weight_shape: tuple[int, ...]
    bias: bool
    groups: int = 1
    output_dim: ClassVar[int] = -1
    feature_dims: ClassVar[tuple[int | None, int | None]] = (-1, -1)

    @property
    def mixes_features(self) -> bool:
        return True

    def apply(self, x: Tensor, u: Parts) -> Tensor:
        return F.linear(x, *u)

    def input_grad(self, v: Tensor, weight: Tensor, x_shape: torch.Size) -> Tensor:
        return v @ weight

    def grad(self, x: Tensor, v: Tensor) -> Parts:
        x, v = x.reshape(-1, x.shape[-1]), v.reshape(-1, v.shape[-1])
        return [v.T @ x, v.sum(0)] if self.bias else [v.T @ x]

    def patches(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], -1, 1, x.shape[-1])

    def rows(self, h: Tensor) -> Tensor:
        return h.reshape(h.shape[0], -1, 1, h.shape[-1])

    def unrows(self, rows: Tensor) -> Tensor:
        return rows.flatten(1)

    def together(self, uses: list[Tensor]) -> Tensor:
        return torch.cat([use.reshape(len(use), -1, use.shape[-1]) for use in uses], 1)

    def sample_grads(self, x: Tensor, v: Tensor) -> Tensor:
        x, v = (a if a.dim() == 3 else a.reshape(len(a), -1, a.shape[-1]) for a in (x, v))
        return torch.bmm(v.mT, x)[:, None]

    def form_over_places(
        self, x: Tensor, p: Tensor, others: int, recompute: bool | None
    ) -> type[Explicit] | type[ByPlaces] | None:
        return None if x.dim() == 2 else super().form_over_places(x, p, others, recompute)

    def sample_gradients(
        self, x: Tensor, p: Tensor, *, others: int = 1, recompute: bool | None = None
    ) -> SampleGradients:
        return (
            RankOne(self, x, p) if x.dim() == 2 else super().sample_gradients(x, p, others=others, recompute=recompute)
        )


@dataclass(eq=False)
class RankOne:
    """A linear layer on (B, n) inputs: p_u = x~ (x) p, so everything factors into inputs and outputs."""

    layer: Layer
    x: Tensor  # (B, J0)
    p: Tensor  # (B, O)
    _kept: tuple[Metric, Tensor, Tensor] | None = None

    def dots(self, metric: Metric, p: Tensor | None = None) -> Tensor:
        if metric.is_identity:
            outputs = torch.linalg.vecdot(self.p, self.p if p is None else p)
            inputs = torch.linalg.vecdot(self.x, self.x)
            return torch.addcmul(outputs, inputs, outputs) if self.layer.bias else inputs * outputs
        x, left = self._rotated(metric)
        right = left if p is None else metric.rows(p[:, None])[:, 0]
        D = metric.diagonal(self.layer)
        if D is None:
            return x.square().sum(1) * torch.linalg.vecdot(left, right)
        return torch.linalg.vecdot((left * right) @ D[0], x.square())

    def gram(self, metric: Metric, other: RankOne | None = None) -> Tensor:
        if metric.is_identity:
            those = self if other is None else other
            inputs, outputs = self.x @ those.x.T, self.p @ those.p.T
            return torch.addcmul(outputs, inputs, outputs) if self.layer.bias else inputs.mul_(outputs)
        x, p = self._rotated(metric)
        y, q = (x, p) if other is None else other._rotated(metric)
        D = metric.diagonal(self.layer)
        if D is None:
            return (x @ y.T).mul_(p @ q.T)
        # D does not factor: sqrt(D) p_u explicitly, some outputs at a time so that memory stays bounded
        K = x.new_zeros(len(x), len(y))
        rows = max(1, CHUNK // y.numel())
        for some in range(0, p.shape[1], rows):
            root = D[0, some : some + rows].sqrt()
            block = (p[:, some : some + rows, None] * x[:, None] * root).flatten(1)
            right = block if other is None else (q[:, some : some + rows, None] * y[:, None] * root).flatten(1)
            K.addmm_(block, right.T)
        return K

    def _rotated(self, metric: Metric) -> tuple[Tensor, Tensor]:
        """T_A x~ and T_G p of each sample: (B, J), (B, O)."""
        if self._kept is None or self._kept[0] is not metric:
            x = F.pad(self.x, (0, 1), value=1.0) if self.layer.bias else self.x
            self._kept = metric, metric.columns(x[:, None])[:, 0], metric.rows(self.p[:, None])[:, 0]
        return self._kept[1:]

    def combine(self, w: Tensor) -> Parts:
        return self.layer.grad(self.x, scale_samples(w, self.p))

    def solved(self, w: Tensor, metric: Metric) -> Parts:
        (_, O, J), B = self.layer.joint_shape, len(w)
        T_A, T_G = metric.T_A, metric.T_G
        if T_A is None or T_G is None or B * (J * J + O * O) > O * J * (O + J):
            return metric.solve(self.layer, self.combine(w))
        # few samples compared with the width: M^-1 on the factors of the gradients, not on their sum
        x, p = self._rotated(metric)
        p = scale_samples(w, p)
        D = metric.diagonal(self.layer)
        joint = (p @ T_G[0]).T @ (x @ T_A[0]) if D is None else T_G[0].T @ (p.T @ x * D[0]) @ T_A[0]
        return self.layer.split(joint[None])

    def add_to(self, u: list[Tensor], w: Tensor, alpha: float) -> None:
        add_weighted(u, w, self.x, self.p, alpha)


def add_weighted(u: list[Tensor], w: Tensor, x: Tensor, p: Tensor, alpha: float, beta: float = 1.0) -> None:
    """u <- beta u + alpha sum_i w_i x~_i (x) p_i, for [W] or [W, b]."""
    w, columns = in_precision(w, p.dtype), p.T
    if len(u) > 1:
        u[1].addmv_(columns, w, alpha=alpha, beta=beta)
    # a few samples at a time bound the memory of the weighted gradients
    for some, rows, inputs in zip(w.split(SAMPLES), columns.split(SAMPLES, 1), x.split(SAMPLES), strict=True):
        u[0].addmm_(rows * some, inputs, alpha=alpha, beta=beta)
        beta = 1.0


def plus_weighted(step: Parts, share: float, w: Tensor, x: Tensor, p: Tensor, alpha: float) -> Parts:
    """share step + alpha sum_i w_i x~_i (x) p_i, for [W] or [W, b]."""
    w, columns = in_precision(w, p.dtype), p.T
    weight = torch.addmm(step[0], columns * w, x, beta=share, alpha=alpha)
    return [weight, *(torch.addmv(part, columns, w, beta=share, alpha=alpha) for part in step[1:])]
