"""Per-sample gradients in balanced variables (`ddp.balance`), seen from the weights themselves.

The Gram matrix is that of psi o P_u o xi, and an update in balanced variables is one of psi o . o xi in the weights:
together the metric M^-1 = psi^2 (x) xi^2. Each form applies the factors where that costs least: to explicit gradients
rather than to activations, once to inputs and outputs where the gradients are never formed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from ddpnopt.ddp.balance import Balance, Diagonal, Mixing
from ddpnopt.linear.given import Given
from ddpnopt.linear.layer import Layer, Parts, in_precision, per_sample_dot, scale_samples, symmetric_product
from ddpnopt.linear.linear import Linear, add_weighted, plus_weighted
from ddpnopt.linear.metric import IDENTITY, Metric
from ddpnopt.linear.sample_gradients import ByPlaces, Explicit, SampleGradients, Sums, output_pieces

EMPTY = torch.empty(0)


class BalancedGradients(Sums, Protocol):
    """P_u of one layer; weighted sums are M^-1 P_u w."""

    def couple(self, steps: list[Parts]) -> tuple[Tensor, list[Tensor]]:
        """K = P_u' M^-1 P_u, (B, B), and <p_u[i], step> of each step, (B,): its effect on each sample's loss."""


class SummedUp(ABC):
    """Forms whose sum is materialised before it is added."""

    @abstractmethod
    def combine(self, w: Tensor) -> Parts: ...

    def solved(self, w: Tensor, metric: Metric) -> Parts:
        return self.combine(w)

    def add_to(self, u: list[Tensor], w: Tensor, alpha: float) -> None:
        torch._foreach_add_(u, self.combine(w), alpha=alpha)


class OneGradient(SummedUp):
    """Forms that keep inputs and output gradients, and compute a sum by one weighted gradient of the layer."""

    def __init__(self, layer: Layer, x: Tensor, p: Tensor, balance: Balance) -> None:
        self.layer, self.x, self.p, self.balance = layer, x, p, balance

    def combine(self, w: Tensor) -> Parts:
        layer, x, p, balance = self.layer, self.x, self.p, self.balance
        if not isinstance(balance, Mixing):
            return balance.scale(_weighted(layer, x, p, w), 2)
        # each factor twice, at the places of all samples or on the sum, whichever are fewer
        O, J, inputs, outputs, _ = _sizes(layer, x, p)
        at_inputs, at_outputs = len(x) * inputs < O * J // layer.weight_shape[1], len(x) * outputs < J
        u = _weighted(layer, balance.inputs(x, 2) if at_inputs else x, _raised(p, balance, at_outputs), w)
        u = balance.scale_kernel(u if at_inputs else balance.scale_inputs(u, 2), 2)
        return u if at_outputs else balance.scale_outputs(u, 2)


class OuterProducts:
    """A linear layer on (B, n) inputs: p_u = x~ (x) p; the factors, squared, go to one of the two sides."""

    def __init__(self, layer: Linear, x: Tensor, p: Tensor, balance: Balance | tuple[Tensor, Tensor]) -> None:
        """In the place of the balance there may be what it makes of x and p."""
        self.layer, self.x, self.p = layer, x, p
        if isinstance(balance, tuple):
            self.raised_x, self.raised_p = balance
        elif isinstance(balance, Mixing):
            self.raised_x, self.raised_p = balance.input_root.times(x, -1, 2), balance.output_root.times(p, -1, 2)
        else:
            self.raised_x, self.raised_p = balance.inputs(x, 2), balance.outputs(p, 2)

    def couple(self, steps: list[Parts]) -> tuple[Tensor, list[Tensor]]:
        inputs, outputs = symmetric_product(self.raised_x, self.x), symmetric_product(self.raised_p, self.p)
        K = torch.addcmul(outputs, inputs, outputs) if self.layer.bias else inputs.mul_(outputs)
        return K, [per_sample_dot(self.p, self.layer.apply(self.x, step)) for step in steps]

    def raised(self) -> tuple[Tensor, Tensor]:
        """x and p with both factors of their side."""
        return self.raised_x, self.raised_p

    def combine(self, w: Tensor) -> Parts:
        x, p = self.raised()
        return self.layer.grad(x, scale_samples(w, p))

    def solved(self, w: Tensor, metric: Metric) -> Parts:
        return self.combine(w)

    def add_to(self, u: list[Tensor], w: Tensor, alpha: float, beta: float = 1.0) -> None:
        """u <- beta u + alpha M^-1 P_u w."""
        add_weighted(u, w, *self.raised(), alpha, beta)

    def plus(self, step: Parts, share: float, w: Tensor, alpha: float) -> Parts:
        """share step + alpha M^-1 P_u w, in one call for each part."""
        return plus_weighted(step, share, w, *self.raised(), alpha)


class Stored(SummedUp):
    """Explicit gradients in balanced variables, made when they are coupled."""

    def __init__(self, layer: Layer, x: Tensor, p: Tensor, balance: Balance) -> None:
        self.balance = balance
        self._given: tuple[Layer, Tensor, Tensor] | None = (layer, x, p)
        self._inside: Explicit | None = None

    def couple(self, steps: list[Parts]) -> tuple[Tensor, list[Tensor]]:
        assert self._given is not None
        self._inside, effects = _explicit(*self._given, self.balance, steps)
        self._given = None
        self._inside.x = EMPTY  # the gradients are all that is needed
        return self._inside.gram(IDENTITY), effects

    def combine(self, w: Tensor) -> Parts:
        assert self._inside is not None
        return self.balance.scale(self._inside.combine(w))


class Repeated(OneGradient):
    """Explicit gradients that are freed at once: the effects are computed while they are there."""

    def couple(self, steps: list[Parts]) -> tuple[Tensor, list[Tensor]]:
        layer, x, p, balance = self.layer, self.x, self.p, self.balance
        pieces = output_pieces(layer, len(x))
        if len(pieces) == 1:
            explicit, effects = _explicit(layer, x, p, balance, steps)
            return explicit.gram(IDENTITY), effects
        layer, steps = balance.of(layer), [balance.scale_kernel(step, -1) for step in steps]
        if isinstance(balance, Mixing):  # outputs that are taken together later cannot be mixed later
            x, p, steps = balance.inputs(x), balance.outputs(p), [balance.scale_outputs(step, -1) for step in steps]
        parts = [self._couple_piece(layer, x, p, steps, start, n) for start, n in pieces]
        K, effects = parts[0]
        for more, others in parts[1:]:
            K.add_(more)
            effects = [a + b for a, b in zip(effects, others, strict=True)]
        return K, effects

    def _couple_piece(
        self, layer: Layer, x: Tensor, p: Tensor, steps: list[Parts], start: int, n: int
    ) -> tuple[Tensor, list[Tensor]]:
        """The part of some outputs; its gradients are freed before those of the next."""
        balance = self.balance
        narrow, own = layer.narrow(p, start, n)
        explicit = Explicit(narrow, x, own)
        some = [[part.narrow(0, start, n) for part in step] for step in steps]
        if isinstance(balance, Mixing):
            return explicit.gram(IDENTITY), [explicit_effect(explicit, balance.scale_inputs(step, -1)) for step in some]
        assert isinstance(balance, Diagonal)
        effects = [explicit_effect(explicit, step) for step in some]
        _rescale(explicit, [factor.narrow(0, start, n) for factor in balance.factors])
        return explicit.gram(IDENTITY), effects


class Tokens(OneGradient):
    """Inner products through the places, on inputs and output gradients in balanced variables, which are not kept."""

    def couple(self, steps: list[Parts]) -> tuple[Tensor, list[Tensor]]:
        layer, x, p = self.layer, self.x, self.p
        effects = [per_sample_dot(p, layer.apply(x, step)) for step in steps]
        balance = self.balance
        return ByPlaces(balance.of(layer), balance.inputs(x), balance.outputs(p)).gram(IDENTITY), effects


class InBalance(SummedUp):
    """Any other form, on inputs and output gradients in balanced variables."""

    def __init__(
        self, layer: Layer, x: Tensor, p: Tensor, balance: Balance, others: int, recompute: bool | None
    ) -> None:
        self.layer, self.x, self.p, self.balance = layer, x, p, balance
        given = balance.inputs(x), balance.outputs(p)
        self.inside = balance.of(layer).sample_gradients(*given, others=others, recompute=recompute)

    def couple(self, steps: list[Parts]) -> tuple[Tensor, list[Tensor]]:
        effects = [per_sample_dot(self.p, self.layer.apply(self.x, step)) for step in steps]
        return self.inside.gram(IDENTITY), effects

    def combine(self, w: Tensor) -> Parts:
        return self.balance.scale(self.inside.combine(w))


class Scaled(SummedUp):
    """Sums of gradients that are in balanced variables already."""

    def __init__(self, inside: SampleGradients, balance: Balance) -> None:
        self.inside, self.balance = inside, balance

    def combine(self, w: Tensor) -> Parts:
        return self.balance.scale(self.inside.combine(w))


def _weighted(layer: Layer, x: Tensor, p: Tensor, w: Tensor) -> Parts:
    """sum_i w_i p_u[i]; the weights go to inputs or outputs, whichever are fewer."""
    if x.numel() >= p.numel() or not x.is_floating_point():
        return layer.grad(x, scale_samples(w, p))
    weight, *bias = layer.grad(scale_samples(w, x), p)
    return [weight, *(torch.mv(layer.rows(p).sum(1).flatten(1).T, w.to(part.dtype)).view_as(part) for part in bias)]


def _raised(p: Tensor, balance: Mixing, raise_it: bool) -> Tensor:
    return balance.outputs(p, 2) if raise_it else p


def _sizes(layer: Layer, x: Tensor, p: Tensor) -> tuple[int, int, int, int, int]:
    """Of a layer without groups: outputs, inputs x kernel, places of a sample's inputs and outputs, kernel."""
    O, C = layer.weight_shape[:2]
    J = prod(layer.weight_shape[1:])
    return O, J, x.numel() // (len(x) * C), p.numel() // (len(p) * O), J // C


def _explicit(
    layer: Layer, x: Tensor, p: Tensor, balance: Balance, steps: list[Parts]
) -> tuple[Explicit, list[Tensor]]:
    """Explicit gradients in balanced variables, and the effect of each step on the samples."""
    if not isinstance(balance, Mixing):
        assert isinstance(balance, Diagonal)
        found = Explicit(balance.of(layer), x, p)
        effects = [explicit_effect(found, balance.scale_kernel(step, -1)) for step in steps]
        _rescale(found, balance.factors)
        return found, effects
    # each matrix is applied to the places of a sample or to its gradient, whichever is smaller; the gradient has the
    # kernel behind the input features, so that there the matrix is one of all features and places of the kernel
    O, J, inputs, outputs, kernel = _sizes(layer, x, p)
    late_inputs, late_outputs = balance.input_root.dense and O * kernel**2 < inputs, outputs > J
    steps = [balance.scale_kernel(step, -1) for step in steps]
    if not late_inputs:
        x, steps = balance.inputs(x), [balance.scale_inputs(step, -1) for step in steps]
    if not late_outputs:
        p, steps = balance.outputs(p), [balance.scale_outputs(step, -1) for step in steps]
    found = Explicit(balance.of(layer), x, p)
    effects = [explicit_effect(found, step) for step in steps]
    if late_inputs:
        matrix = in_precision(balance.input_root.power(1), found.weight.dtype)
        found.weight = found.weight @ (torch.kron(matrix, torch.eye(kernel).to(matrix)) if kernel > 1 else matrix)
    if late_outputs:
        found.weight = balance.output_root.times(found.weight, 2)
        found.bias = None if found.bias is None else balance.output_root.times(found.bias, -1)
    return found, effects


def _rescale(explicit: Explicit, factors: Parts) -> None:
    """Turn explicit gradients into those in balanced variables, in place."""
    if isinstance(explicit.layer, Given):  # they are the recorded ones
        explicit.weight = explicit.weight * factors[0].reshape(1, -1, 1)
    elif factors[0].dim():  # a norm has none
        explicit.weight.view(-1, *explicit.layer.weight_shape).mul_(factors[0])
        if explicit.bias is not None:
            explicit.bias.view(-1, *explicit.layer.bias_shape).mul_(factors[1])


def explicit_effect(explicit: Explicit, step: Parts) -> Tensor:
    """<p_u[i], step> for each sample."""
    found = explicit.weight.flatten(1) @ step[0].flatten()
    return found if explicit.bias is None else found.addmv_(explicit.bias.flatten(1), step[1].flatten())
