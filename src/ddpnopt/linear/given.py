"""A parameter whose per-sample gradients are given: the control of parameters that belong to no linear layer."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from ddpnopt.linear.layer import Layer, Parts
from ddpnopt.linear.sample_gradients import Explicit

BOTH = 2.0  # directions in which a weight is held


@dataclass(frozen=True)
class Given(Layer):
    """h = u, flat, for each sample: the gradient of a sample at h is its gradient with respect to u; x is 1."""

    weight_shape: tuple[int, ...]
    bias: bool = False
    groups: int = 1
    feature_dims: ClassVar[tuple[int | None, int | None]] = (None, 1)

    def apply(self, x: Tensor, u: Parts) -> Tensor:
        return u[0].reshape(1, -1).expand(len(x), -1)

    def input_grad(self, v: Tensor, weight: Tensor, x_shape: torch.Size) -> Tensor:
        return v.new_zeros(x_shape)

    def grad(self, x: Tensor, v: Tensor) -> Parts:
        return [v.sum(0).view(self.weight_shape)]

    def patches(self, x: Tensor) -> Tensor:
        return x.new_ones(len(x), 1, 1, 1)

    def rows(self, h: Tensor) -> Tensor:
        return h.reshape(len(h), 1, 1, prod(self.weight_shape))

    def unrows(self, rows: Tensor) -> Tensor:
        return rows.flatten(1)

    def outer_factors(self, xi: Tensor | None, psi: Tensor | None) -> Parts:
        assert psi is not None
        return [psi.view(self.weight_shape)]

    def sample_grads(self, x: Tensor, v: Tensor) -> Tensor:
        return v.reshape(len(v), 1, prod(self.weight_shape), 1)

    def form_over_places(self, x: Tensor, p: Tensor, others: int, recompute: bool | None) -> type[Explicit]:
        return Explicit

    @property
    def joint_shape(self) -> tuple[int, int, int]:
        return 1, prod(self.weight_shape), 1

    def join(self, u: Parts) -> Tensor:
        lead = u[0].shape[: u[0].dim() - len(self.weight_shape)]
        return u[0].reshape(*lead, *self.joint_shape)

    def split(self, joint: Tensor) -> Parts:
        return [joint.reshape(*joint.shape[:-3], *self.weight_shape)]


def without_held(p: Tensor, held: Tensor) -> Tensor:
    """The gradients of the samples, (B, numbers), without weights that cannot follow: what moves them is undone.

    `held` is 1 where decreases are, -1 where increases are, and `BOTH` where both are.
    """
    return p.masked_fill((held == BOTH) | (held * p.sum(0) > 0), 0.0)
