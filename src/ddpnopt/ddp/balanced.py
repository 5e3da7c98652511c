"""Per-sample gradients in balanced variables (`ddp.balance`), seen from the weights themselves.

The Gram matrix is that of psi o P_u o xi, and an update in balanced variables is one of psi o . o xi in the weights:
together the metric M^-1 = psi^2 (x) xi^2. Each form applies the factors where that costs least: to explicit gradients
rather than to activations, once to inputs and outputs where the gradients are never formed.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch
from torch import Tensor

from ddpnopt.ddp.balance import Balance, Diagonal
from ddpnopt.linear.given import Given
from ddpnopt.linear.layer import Layer, Parts, per_sample_dot, scale_samples, symmetric_product
from ddpnopt.linear.linear import Linear, RankOne
from ddpnopt.linear.metric import IDENTITY, Metric
from ddpnopt.linear.sample_gradients import ByPlaces, Explicit, Recomputed, SampleGradients, Sums, output_pieces
from ddpnopt.linear.uses import LinearUses


class BalancedGradients(Sums, Protocol):
    """P_u of one layer; weighted sums are M^-1 P_u w."""

    def couple(self, steps: list[Parts]) -> tuple[Tensor, list[Tensor]]:
        """K = P_u' M^-1 P_u, (B, B), and <p_u[i], step> of each step, (B,): its effect on each sample's loss."""


def balanced_gradients(
    layer: Layer, x: Tensor, p: Tensor, balance: Balance, *, others: int, recompute: bool | None
) -> BalancedGradients:
    """The form with the least work for inputs x and output gradients p."""
    if type(layer) is Linear and x.dim() == 2:
        return OuterProducts(layer, x, p, balance)
    if isinstance(layer, LinearUses):
        return InBalance(layer, x, p, balance, others, recompute)
    inputs, outputs = (x, p) if isinstance(balance, Diagonal) else (balance.inputs(x), balance.outputs(p))
    found = layer.sample_gradients(inputs, outputs, others=others, recompute=recompute)
    if isinstance(found, Explicit):
        if isinstance(balance, Diagonal):
            _rescale(found, balance.factors)
        return Stored(found, balance)
    if isinstance(found, Recomputed):
        return Repeated(Recomputed(layer, x, p), balance)
    if isinstance(found, ByPlaces):
        return Tokens(ByPlaces(layer, x, p), balance)
    return InBalance(layer, x, p, balance, others, recompute)


class _SummedUp:
    """Forms whose sum is materialised before it is added."""

    balance: Balance
    missing: ClassVar[int] = 1  # how many of the two factors `_sum` lacks

    def _sum(self, w: Tensor) -> Parts:
        """P_u w with one of the two factors, or with none."""
        raise NotImplementedError

    def combine(self, w: Tensor) -> Parts:
        return self.balance.scale(self._sum(w), self.missing)

    def solved(self, w: Tensor, metric: Metric) -> Parts:
        return self.combine(w)

    def add_to(self, u: list[Tensor], w: Tensor, alpha: float) -> None:
        for weight, part in zip(u, self.combine(w), strict=True):
            weight.add_(part, alpha=alpha)


class OuterProducts:
    """A linear layer on (B, n) inputs: p_u = x~ (x) p; the factors, squared, go to one of the two sides."""

    def __init__(self, layer: Linear, x: Tensor, p: Tensor, balance: Balance) -> None:
        self.layer, self.x, self.p = layer, x, p
        self.raised_x, self.raised_p = balance.inputs(x, 2), balance.outputs(p, 2)

    def couple(self, steps: list[Parts]) -> tuple[Tensor, list[Tensor]]:
        inputs, outputs = symmetric_product(self.raised_x, self.x), symmetric_product(self.raised_p, self.p)
        K = torch.addcmul(outputs, inputs, outputs) if self.layer.bias else inputs.mul_(outputs)
        return K, [per_sample_dot(self.p, self.layer.apply(self.x, step)) for step in steps]

    def combine(self, w: Tensor) -> Parts:
        return self.layer.grad(self.raised_x, scale_samples(w, self.raised_p))

    def solved(self, w: Tensor, metric: Metric) -> Parts:
        return self.combine(w)

    def add_to(self, u: list[Tensor], w: Tensor, alpha: float) -> None:
        RankOne(self.layer, self.raised_x, self.raised_p).add_to(u, w, alpha)


class Stored(_SummedUp):
    """Explicit gradients in balanced variables: their effects are inner products, not another pass of the layer."""

    def __init__(self, inside: Explicit, balance: Balance) -> None:
        self.inside, self.balance = inside, balance

    def couple(self, steps: list[Parts]) -> tuple[Tensor, list[Tensor]]:
        return self.inside.gram(IDENTITY), [_effect(self.inside, self.balance.scale(step, -1)) for step in steps]

    def _sum(self, w: Tensor) -> Parts:
        return self.inside.combine(w)


class Repeated(_SummedUp):
    """Explicit gradients that are freed at once: the effects are computed while they are there."""

    missing = 2

    def __init__(self, plain: Recomputed, balance: Balance) -> None:
        self.plain, self.balance = plain, balance

    def couple(self, steps: list[Parts]) -> tuple[Tensor, list[Tensor]]:
        layer, x, p, balance = self.plain.layer, self.plain.x, self.plain.p, self.balance
        factors: Parts | None = None
        if isinstance(balance, Diagonal):  # cheaper on the gradients than on inputs and outputs
            factors = balance.factors
        else:
            x, p = balance.inputs(x), balance.outputs(p)
        unscaled = [balance.scale(step, -1) for step in steps]
        pieces = output_pieces(layer, len(x))
        if len(pieces) == 1:
            return self._part(Explicit(layer, x, p), factors, unscaled)
        parts = []
        for start, n in pieces:
            narrow, own = layer.narrow(p, start, n)
            some = [[part.narrow(0, start, n) for part in step] for step in unscaled]
            at = None if factors is None else [factor.narrow(0, start, n) for factor in factors]
            parts.append(self._part(Explicit(narrow, x, own), at, some))
        K, effects = parts[0]
        for more, others in parts[1:]:
            K.add_(more)
            effects = [a + b for a, b in zip(effects, others, strict=True)]
        return K, effects

    @staticmethod
    def _part(explicit: Explicit, factors: Parts | None, unscaled: list[Parts]) -> tuple[Tensor, list[Tensor]]:
        if factors is not None:
            _rescale(explicit, factors)
        return explicit.gram(IDENTITY), [_effect(explicit, step) for step in unscaled]

    def _sum(self, w: Tensor) -> Parts:
        return self.plain.combine(w)


class Tokens(_SummedUp):
    """Inner products through the places, on inputs and output gradients in balanced variables, which are not kept."""

    missing = 2

    def __init__(self, plain: ByPlaces, balance: Balance) -> None:
        self.plain, self.balance = plain, balance

    def couple(self, steps: list[Parts]) -> tuple[Tensor, list[Tensor]]:
        layer, x, p = self.plain.layer, self.plain.x, self.plain.p
        effects = [per_sample_dot(p, layer.apply(x, step)) for step in steps]
        return ByPlaces(layer, self.balance.inputs(x), self.balance.outputs(p)).gram(IDENTITY), effects

    def _sum(self, w: Tensor) -> Parts:
        return self.plain.combine(w)


class InBalance(_SummedUp):
    """Any other form, on inputs and output gradients in balanced variables."""

    def __init__(
        self, layer: Layer, x: Tensor, p: Tensor, balance: Balance, others: int, recompute: bool | None
    ) -> None:
        self.layer, self.x, self.p, self.balance = layer, x, p, balance
        self.inside = layer.sample_gradients(balance.inputs(x), balance.outputs(p), others=others, recompute=recompute)

    def couple(self, steps: list[Parts]) -> tuple[Tensor, list[Tensor]]:
        effects = [per_sample_dot(self.p, self.layer.apply(self.x, step)) for step in steps]
        return self.inside.gram(IDENTITY), effects

    def _sum(self, w: Tensor) -> Parts:
        return self.inside.combine(w)


class Scaled(_SummedUp):
    """Sums of gradients that are in balanced variables already."""

    def __init__(self, inside: SampleGradients, balance: Balance) -> None:
        self.inside, self.balance = inside, balance

    def _sum(self, w: Tensor) -> Parts:
        return self.inside.combine(w)


def _rescale(explicit: Explicit, factors: Parts) -> None:
    """Turn explicit gradients into those in balanced variables, in place."""
    if isinstance(explicit.layer, Given):  # they are the recorded ones
        explicit.weight = explicit.weight * factors[0].reshape(1, -1, 1)
    elif factors[0].dim():  # a norm has none
        explicit.weight.view(-1, *explicit.layer.weight_shape).mul_(factors[0])
        if explicit.bias is not None:
            explicit.bias.view(-1, *explicit.layer.bias_shape).mul_(factors[1])


def _effect(explicit: Explicit, step: Parts) -> Tensor:
    """<p_u[i], step> for each sample."""
    found = explicit.weight.flatten(1) @ step[0].flatten()
    return found if explicit.bias is None else found.addmv_(explicit.bias.flatten(1), step[1].flatten())
