"""Per-sample gradients with respect to one layer's parameters, never materialised where that can be avoided.

For sample i it is the vector P_u[i] = g_u' p_i. Three things are computed from them: their squared norms under a metric
(s of Proposition 2), their Gram matrix (K_t of the batch-coupled form), and weighted sums (the update).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from ddpnopt.linear.layer import Layer, Parts, scale_samples, symmetric_product
from ddpnopt.linear.metric import Metric

CHUNK = 2**24  # numbers held at once where a Gram matrix goes through explicit gradients
SYMMETRIC, PIECES = 512, 8  # from so many places of all samples on, half of a Gram matrix, in so many pieces
TEMPORARY = 5 * 2**18  # … that are not stored: small enough for the cache
STORED = 2**18  # numbers of explicit gradients that are stored in any case


class Sums(Protocol):
    """Weighted sums of vectors in a layer's parameter space."""

    def combine(self, w: Tensor) -> Parts:
        """P_u w = sum_i w_i p_u[i]."""

    def solved(self, w: Tensor, metric: Metric) -> Parts:
        """M^-1 P_u w."""

    def add_to(self, u: list[Tensor], w: Tensor, alpha: float) -> None:
        """u <- u + alpha P_u w, without materialising the sum where that can be avoided."""


class SampleGradients(Sums, Protocol):
    """P_u of one layer: B vectors in its parameter space."""

    def dots(self, metric: Metric, p: Tensor | None = None) -> Tensor:
        """p_u' M^-1 p_u for each sample, or with other output gradients p on the right: (B,)."""

    def gram(self, metric: Metric, other: Any = None) -> Tensor:
        """K = P_u' M^-1 P_u: (B, B), or with other samples' gradients of the same form on the right: (B, B')."""


class _Materialised(ABC):
    """Forms whose sum is materialised before it is added."""

    layer: Layer

    @abstractmethod
    def combine(self, w: Tensor) -> Parts: ...

    def solved(self, w: Tensor, metric: Metric) -> Parts:
        return metric.solve(self.layer, self.combine(w))

    def add_to(self, u: list[Tensor], w: Tensor, alpha: float) -> None:
        for weight, part in zip(u, self.combine(w), strict=True):
            weight.add_(part, alpha=alpha)


class Explicit(_Materialised):
    """Explicit gradients, (B, parameters): convolutions, and token models with small layers."""

    def __init__(self, layer: Layer, x: Tensor, p: Tensor) -> None:
        self.layer, self.x = layer, x
        self.weight = layer.sample_grads(x, p)  # (B, g, O, J0)
        self.bias = layer.rows(p).sum(1) if layer.bias else None  # (B, g, O)

    @classmethod
    def of(cls, layer: Layer, like: Explicit, flat: Tensor) -> Explicit:
        """From the explicit gradients of another process, (B, parameters)."""
        made = cls.__new__(cls)
        made.layer, made.x = layer, like.x
        sizes = [like.weight[0].numel()] + ([] if like.bias is None else [like.bias[0].numel()])
        pieces = flat.split(sizes, 1)
        made.weight = pieces[0].view(-1, *like.weight.shape[1:])
        made.bias = None if like.bias is None else pieces[1].view(-1, *like.bias.shape[1:])
        return made

    def _rotated(self, metric: Metric) -> Tensor:
        """T_G p_u T_A' in the joint form: (B, g, O, J)."""
        joint = self.weight if self.bias is None else torch.cat([self.weight, self.bias[..., None]], -1)
        if metric.T_A is not None and metric.T_G is not None:
            joint = metric.T_G @ joint @ metric.T_A.mT
        return joint

    def _pieces(self, metric: Metric) -> list[Tensor]:
        """Pieces of sqrt(M^-1) p_u, each (B, …), whose inner products add up."""
        if metric.is_identity:
            pieces = [self.weight] if self.bias is None else [self.weight, self.bias]
        else:
            joint, D = self._rotated(metric), metric.diagonal(self.layer)
            pieces = [joint if D is None else joint * D.sqrt()]
        return [piece.flatten(1) for piece in pieces]

    def dots(self, metric: Metric, p: Tensor | None = None) -> Tensor:
        D = metric.diagonal(self.layer)
        if D is not None and p is None:
            return self._rotated(metric).square().flatten(1) @ D.flatten()
        left = self._pieces(metric)
        right = left if p is None else Explicit(self.layer, self.x, p)._pieces(metric)
        dots = [torch.linalg.vecdot(a, b) for a, b in zip(left, right, strict=True)]
        return torch.stack(dots).sum(0)

    def gram(self, metric: Metric, other: Explicit | None = None) -> Tensor:
        left = self._pieces(metric)
        right = left if other is None else other._pieces(metric)
        K = symmetric_product(left[0], left[0]) if other is None else left[0] @ right[0].T
        return K if len(left) == 1 else K.addmm_(left[1], right[1].T)

    def combine(self, w: Tensor) -> Parts:
        w = w.to(self.weight.dtype)
        weight = (w @ self.weight.flatten(1)).view(self.layer.weight_shape)
        return [weight] if self.bias is None else [weight, (w @ self.bias.flatten(1)).view(self.layer.bias_shape)]


class ByPlaces(_Materialised):
    """Few places and large weights (tokens): inner products through the places, sums through one gradient."""

    explicit = False  # whether inner products use explicit gradients for every metric

    def __init__(self, layer: Layer, x: Tensor, p: Tensor) -> None:
        self.layer, self.x, self.p = layer, x, p

    def dots(self, metric: Metric, p: Tensor | None = None) -> Tensor:
        if self.explicit or metric.D is not None:
            return self._over_outputs(metric, p, lambda part, m, q: part.dots(m, q))
        X = metric.columns(self.layer.augmented(self.x))
        left = metric.rows(self.layer.rows(self.p))
        right = left if p is None else metric.rows(self.layer.rows(p))
        places = torch.einsum("bpgj,bqgj->bgpq", X, X) * torch.einsum("bpgo,bqgo->bgpq", left, right)
        return places.sum((1, 2, 3))

    def gram(self, metric: Metric, other: ByPlaces | None = None) -> Tensor:
        if self.explicit or metric.D is not None:
            if other is not None:
                return Explicit(self.layer, self.x, self.p).gram(metric, Explicit(other.layer, other.x, other.p))
            return self._over_outputs(metric, None, lambda part, m, _: part.gram(m))
        X, V = self._rotated(metric)
        Y, W = (X, V) if other is None else other._rotated(metric)
        (B, P), C = X.shape[:2], Y.shape[0]
        K = X.new_zeros(B, C)
        pieces = 1 if B * P < SYMMETRIC or other is not None else PIECES
        some = max(1, min(CHUNK // (C * P * P), -(-B // pieces)))
        for g in range(X.shape[2]):
            x, v, y, w = (a[:, :, g].flatten(0, 1) for a in (X, V, Y, W))
            for i in range(0, B, some):
                # of its own gradients the blocks to the right of the diagonal alone
                rows, first = slice(i * P, (i + some) * P), 0 if other is not None else i
                block = (x[rows] @ y[first * P :].T).mul_(v[rows] @ w[first * P :].T)
                K[i : i + some, first:] += _sums_over_places(block, P)
        return K if other is not None or some >= B else _mirrored(K, some)

    def _over_outputs(
        self, metric: Metric, p: Tensor | None, ask: Callable[[Explicit, Metric, Tensor | None], Tensor]
    ) -> Tensor:
        """Inner products of explicit gradients, for a few outputs at a time where the metric does not mix outputs."""
        pieces = output_pieces(self.layer, len(self.x))
        if metric.T_A is not None or len(pieces) == 1:
            return ask(Explicit(self.layer, self.x, self.p), metric, p)
        total: Tensor | None = None
        for some in pieces:
            layer, own = self.layer.narrow(self.p, *some)
            other = None if p is None else self.layer.narrow(p, *some)[1]
            D = None if metric.D is None else [d.narrow(0, *some) for d in metric.D]
            part = ask(Explicit(layer, self.x, own), Metric(D=D), other)
            total = part if total is None else total.add_(part)
        assert total is not None
        return total

    def _rotated(self, metric: Metric) -> tuple[Tensor, Tensor]:
        return metric.columns(self.layer.augmented(self.x)), metric.rows(self.layer.rows(self.p))

    def combine(self, w: Tensor) -> Parts:
        return self.layer.grad(self.x, scale_samples(w, self.p))


def _sums_over_places(block: Tensor, P: int) -> Tensor:
    """(B P, C P) -> (B, C); one dimension after the other is much faster than both at once."""
    rows = block.view(-1, P, block.shape[1]).sum(1)
    return rows.view(rows.shape[0], -1, P).sum(2)


def _mirrored(K: Tensor, some: int) -> Tensor:
    """A symmetric matrix whose blocks of so many rows are known from the diagonal on."""
    for i in range(some, K.shape[0], some):
        K[i : i + some, :i] = K[:i, i : i + some].T
    return K


class Recomputed(ByPlaces):
    """Explicit for inner products and freed at once; the sum is computed again, through one gradient."""

    explicit = True


def output_pieces(layer: Layer, samples: int) -> list[tuple[int, int]]:
    """Which outputs to take at once, (first, number), so that explicit gradients stay in the cache."""
    O, pieces = layer.weight_shape[0], -(-samples * prod(layer.weight_shape) // TEMPORARY)
    if layer.groups > 1 or pieces <= 1:
        return [(0, O)]
    rows = -(-O // pieces)  # of equal size: the work before the products is repeated for each piece
    return [(i, min(rows, O - i)) for i in range(0, O, rows)]


def form_over_places(
    layer: Layer, x: Tensor, p: Tensor, others: int, recompute: bool | None
) -> type[Explicit] | type[ByPlaces]:
    """The cheapest form where the weights act at several places (pixels, tokens) of each sample."""
    _, O, J = layer.joint_shape
    P = p[0].numel() // (layer.groups * O)
    # multiplications per sample: through the places, or through explicit weight gradients
    if others * P * P * (J + O) < O * J * (P + others):
        return ByPlaces
    if recompute is None:
        weights = prod(layer.weight_shape)
        recompute = weights > x[0].numel() + p[0].numel() and len(x) * weights > STORED
    return Recomputed if recompute else Explicit
