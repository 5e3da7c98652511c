"""A linear layer whose weight is stored as (inputs, outputs), as in the GPT-2 of `transformers`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ddpnopt.linear.layer import Layer, Parts
from ddpnopt.linear.linear import Linear
from ddpnopt.linear.metric import Metric
from ddpnopt.linear.sample_gradients import SampleGradients


def _turned(u: Parts) -> Parts:
    return [u[0].mT, *u[1:]]


@dataclass(frozen=True)
class TransposedLinear(Linear):
    """h = W' x + b on the last dimension."""

    weight_dims: ClassVar[tuple[int, int]] = (0, 1)

    @property
    def plain(self) -> Linear:
        """The same map with the weight of `nn.Linear`."""
        return Linear(self.weight_shape[::-1], self.bias)

    @property
    def bias_shape(self) -> tuple[int, ...]:
        return self.weight_shape[1:]

    @property
    def joint_shape(self) -> tuple[int, int, int]:
        return self.plain.joint_shape

    def apply(self, x: Tensor, u: Parts) -> Tensor:
        return self.plain.apply(x, _turned(u))

    def input_grad(self, v: Tensor, weight: Tensor, x_shape: torch.Size) -> Tensor:
        return v @ weight.mT

    def grad(self, x: Tensor, v: Tensor) -> Parts:
        return _turned(self.plain.grad(x, v))

    def outer_factors(self, xi: Tensor | None, psi: Tensor | None) -> Parts:
        return _turned(self.plain.outer_factors(xi, psi))

    def join(self, u: Parts) -> Tensor:
        return self.plain.join(_turned(u))

    def split(self, joint: Tensor) -> Parts:
        return _turned(self.plain.split(joint))

    def form_over_places(self, x: Tensor, p: Tensor, others: int, recompute: bool | None) -> None:
        return None

    def sample_gradients(
        self, x: Tensor, p: Tensor, *, others: int = 1, recompute: bool | None = None
    ) -> SampleGradients:
        return Turned(self, x, p, others=others, recompute=recompute)


class Turned:
    """P_u of such a layer: that of the plain one, with each weight transposed."""

    def __init__(
        self, layer: TransposedLinear, x: Tensor, p: Tensor, *, others: int = 1, recompute: bool | None = None
    ) -> None:
        self.layer: Layer = layer
        self.plain = layer.plain.sample_gradients(x, p, others=others, recompute=recompute)

    @staticmethod
    def _metric(metric: Metric) -> Metric:
        return metric if metric.D is None or metric.T_A is not None else Metric(D=_turned(metric.D))

    def dots(self, metric: Metric, p: Tensor | None = None) -> Tensor:
        return self.plain.dots(self._metric(metric), p)

    def gram(self, metric: Metric, other: Turned | None = None) -> Tensor:
        return self.plain.gram(self._metric(metric), None if other is None else other.plain)

    def combine(self, w: Tensor) -> Parts:
        return _turned(self.plain.combine(w))

    def solved(self, w: Tensor, metric: Metric) -> Parts:
        return metric.solve(self.layer, self.combine(w))

    def add_to(self, u: list[Tensor], w: Tensor, alpha: float) -> None:
        self.plain.add_to(_turned(u), w, alpha)
