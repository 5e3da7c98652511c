"""The scale and shift of a norm as a linear map: h = w o x^ + b, with x^ the normalised input.

The normalisation itself stands between this layer and the one before it; the input of the layer is x^.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from ddpnopt.linear.layer import Layer, Parts
from ddpnopt.linear.sample_gradients import Explicit


@dataclass(frozen=True)
class ScaleShift(Layer):
    """h = w o x + b: as many groups as there are weights, each with one input and one output."""

    weight_shape: tuple[int, ...]
    bias: bool
    channels_first: bool  # the weights belong to dimension 1 (batch and group norm), or else to the last ones
    groups: int = field(init=False)
    feature_dims: ClassVar[tuple[int | None, int | None]] = (None, None)  # x is normalised already

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", prod(self.weight_shape))

    def _spread(self, u: Tensor, x: Tensor) -> Tensor:
        """A parameter, to be multiplied with x elementwise."""
        return u.view(-1, *[1] * (x.dim() - 2)) if self.channels_first else u

    def _places(self, x: Tensor) -> list[int]:
        """The dimensions between the batch and the weights, or behind both."""
        return list(range(2, x.dim()) if self.channels_first else range(1, x.dim() - len(self.weight_shape)))

    def _over_places(self, a: Tensor) -> Tensor:
        """(B, …) -> (B, *weight_shape)."""
        places = self._places(a)
        return a.sum(places) if places else a

    def outer_factors(self, xi: Tensor | None, psi: Tensor | None) -> Parts:
        return [torch.ones(())] * (2 if self.bias else 1)

    def apply(self, x: Tensor, u: Parts) -> Tensor:
        w = self._spread(u[0], x)
        return torch.addcmul(self._spread(u[1], x), x, w) if len(u) > 1 else x * w

    def input_grad(self, v: Tensor, weight: Tensor, x_shape: torch.Size) -> Tensor:
        return v * self._spread(weight, v)

    def grad(self, x: Tensor, v: Tensor) -> Parts:
        over = [0, *self._places(x)]
        return [(x * v).sum(over), v.sum(over)] if self.bias else [(x * v).sum(over)]

    def patches(self, x: Tensor) -> Tensor:
        return self.rows(x)

    def rows(self, h: Tensor) -> Tensor:
        if self.channels_first:
            h = h.movedim(1, -1)
        return h.reshape(len(h), -1, self.groups, 1)

    def unrows(self, rows: Tensor) -> Tensor:
        return rows.movedim(2, 1).flatten(1) if self.channels_first else rows.flatten(1)

    def form_over_places(self, x: Tensor, p: Tensor, others: int, recompute: bool | None) -> type[Explicit]:
        return Explicit  # two numbers per channel and sample

    def sample_grads(self, x: Tensor, v: Tensor) -> Tensor:
        return self._over_places(x * v).reshape(len(x), self.groups, 1, 1)

    def narrow(self, v: Tensor, start: int, rows: int) -> tuple[Layer, Tensor]:
        raise TypeError("a layer with groups has no part with some of its outputs alone")

    def together(self, uses: list[Tensor]) -> Tensor:
        if self.channels_first:
            return torch.cat([use.flatten(2) if use.dim() > 2 else use[:, :, None] for use in uses], 2)
        return torch.cat([use.reshape(len(use), -1, *self.weight_shape) for use in uses], 1)

    @property
    def joint_shape(self) -> tuple[int, int, int]:
        return self.groups, 1, 1 + self.bias

    @property
    def bias_shape(self) -> tuple[int, ...]:
        return self.weight_shape

    def join(self, u: Parts) -> Tensor:
        lead = u[0].shape[: u[0].dim() - len(self.weight_shape)]
        return torch.stack([part.reshape(*lead, self.groups, 1) for part in u], -1)

    def split(self, joint: Tensor) -> Parts:
        return [part.reshape(*joint.shape[:-3], *self.weight_shape) for part in joint.unbind(-1)]
