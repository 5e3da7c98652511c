"""A linear layer whose weight is used several times for each sample, in derivatives too.

The forward pass computes h = W x + b, its derivative by the inputs W' v, the derivative of that W q, and so on. All of
them are linear in W: with p the gradient of the loss at the result, their part of the weight gradient is p x', v p' and
p q'. So every use is a pair of an input-like and an output-like vector; a constant, 1 in the forward pass and 0 in its
derivatives, says whether the bias takes part:

    x: (B, P, J + 1), the constant last        p: (B, P, O)        g_u' p = sum over the uses of p (x, constant)'
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ddpnopt.linear.layer import Parts
from ddpnopt.linear.linear import Linear
from ddpnopt.linear.metric import Metric
from ddpnopt.linear.sample_gradients import Explicit, SampleGradients

PRODUCT = 64  # an elementwise product of two Gram matrices takes as long as this many multiplications in one

Use = tuple[Tensor, Tensor, bool]
"""Input-like (B, …, J), output-like (B, …, O), and whether the bias takes part."""


@dataclass(frozen=True)
class LinearUses(Linear):
    """All uses of `nn.Linear` in one step as places of one layer."""

    @property
    def mixes_features(self) -> bool:
        return False

    def apply(self, x: Tensor, u: Parts) -> Tensor:
        h = F.linear(x[..., :-1], u[0].to(x.dtype))
        return h + x[..., -1:] * u[1].to(x.dtype) if len(u) > 1 else h

    def input_grad(self, v: Tensor, weight: Tensor, x_shape: torch.Size) -> Tensor:
        return F.pad(v @ weight, (0, 1))

    def grad(self, x: Tensor, v: Tensor) -> Parts:
        return self._split(v.flatten(0, -2).T @ x.flatten(0, -2))

    def _split(self, joint: Tensor) -> Parts:
        return [joint[:, :-1], joint[:, -1]] if self.bias else [joint[:, :-1]]

    def patches(self, x: Tensor) -> Tensor:
        return super().patches(x[..., :-1])

    def form_over_places(self, x: Tensor, p: Tensor, others: int, recompute: bool | None) -> None:
        return None

    def sample_gradients(
        self, x: Tensor, p: Tensor, *, others: int = 1, recompute: bool | None = None
    ) -> SampleGradients:
        joint = Linear((self.weight_shape[0], self.weight_shape[1] + 1), bias=False)  # the constant is an input
        if not self.bias:
            x = torch.cat([x[..., :-1], torch.zeros_like(x[..., -1:])], -1)
        if x.dim() == 3 and x.shape[1] == 1:
            x, p = x[:, 0], p[:, 0]
        P, (O, J) = x[0].numel() // x.shape[-1], joint.weight_shape
        if P > 1 and P * P * (J + O + PRODUCT) > O * J and not recompute:
            return OfUses(self, Explicit(joint, x, p))
        return OfUses(self, joint.sample_gradients(x, p, others=others, recompute=recompute))


@dataclass(eq=False)
class OfUses:
    """Per-sample gradients with the bias as a further input."""

    layer: LinearUses
    joint: SampleGradients

    def dots(self, metric: Metric, p: Tensor | None = None) -> Tensor:
        return self.joint.dots(metric, p)

    def gram(self, metric: Metric, other: OfUses | None = None) -> Tensor:
        return self.joint.gram(metric, None if other is None else other.joint)

    def combine(self, w: Tensor) -> Parts:
        return self.layer._split(self.joint.combine(w)[0])

    def solved(self, w: Tensor, metric: Metric) -> Parts:
        return metric.solve(self.layer, self.combine(w))

    def add_to(self, u: list[Tensor], w: Tensor, alpha: float) -> None:
        for weight, part in zip(u, self.combine(w), strict=True):
            weight.add_(part, alpha=alpha)


def stacked(uses: list[Use], places: int) -> tuple[Tensor, Tensor]:
    """x and p of `LinearUses` for the uses of some samples; zeros, which add nothing, up to a number of places."""
    xs, ps = [], []
    for x, p, biased in uses:
        x, p = x.reshape(len(x), -1, x.shape[-1]), p.reshape(len(p), -1, p.shape[-1])
        xs.append(F.pad(x, (0, 1), value=1.0 if biased else 0.0))
        ps.append(p)
    x, p = torch.cat(xs, 1), torch.cat(ps, 1)
    missing = places - x.shape[1]
    return F.pad(x, (0, 0, 0, missing)), F.pad(p, (0, 0, 0, missing))


def places_of(uses: list[Use]) -> int:
    """How many places the uses have for each sample."""
    return sum(x[0].numel() // x.shape[-1] for x, _, _ in uses)


def gradient_of(uses: list[Use]) -> Parts:
    """The sum over all uses and samples: [W, b], or [W] where the bias takes part in none."""
    weight = torch.stack([p.flatten(0, -2).mT @ x.flatten(0, -2) for x, p, _ in uses]).sum(0)
    biased = [p.flatten(0, -2).sum(0) for _, p, constant in uses if constant]
    return [weight, torch.stack(biased).sum(0)] if biased else [weight]
