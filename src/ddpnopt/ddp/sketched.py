"""Per-sample gradients of large layers, through random combinations of their inputs and outputs.

The Gram matrix of B samples has B^2 numbers, a layer's gradients have B O J: most of the work on a large layer would be
spent on inner products that the solver does not need to many digits, since its damping is as large as their diagonal.
With Omega and Psi of `Root.sketch`, whose outer products are the identity on average,

    K[i, j] = <p_u[i], p_u[j]> ~ <Psi' p_u[i] Omega, Psi' p_u[j] Omega>

is unbiased and costs a k-th part; so do the effects of a step on the samples. Both are known to about 1 / k of the
norms, independently in each layer, and new combinations are drawn whenever the factors of the balance are refreshed.
The weighted sum, which is the update, is exact. Its own combinations, which the next step asks for, are the same sum
of the combined gradients: the weights need not be gone through until new combinations are drawn.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from math import ceil, prod
from typing import Protocol

import torch
from torch import Tensor

from ddpnopt.ddp.balance import Mixing
from ddpnopt.ddp.balanced import EMPTY, BalancedGradients, OneGradient, OuterProducts
from ddpnopt.ddp.covariance import Root
from ddpnopt.linear.convolution import Conv
from ddpnopt.linear.layer import Layer, Parts, in_precision, per_sample_dot, scale_samples
from ddpnopt.linear.linear import Linear, RankOne
from ddpnopt.linear.metric import IDENTITY
from ddpnopt.linear.sample_gradients import Explicit

NUMBERS = 32  # that are kept of each gradient, for each sample; at each place of a kernel
SENT = 4  # … in all, where several processes exchange them: enough to tell all samples apart
LARGE = 4  # weights for each of them from which on a layer is large
# multiplications of one product with the weights, at several places or a single one, below which all is exact
WORK = (2**22, 2**25)


def combinations(layer: Layer, samples: int, *, sent: bool = False) -> int:
    """k, of the input features and of the outputs: k^2 numbers at each place of a kernel.

    An inner product is known to 1 / k of the norms, and what a step does to a sample is a sum over all samples, whose
    errors add up to samples^1/2 / k of it: the same for all batches if k^2 grows with them.
    """
    numbers = SENT * samples / prod(layer.weight_shape[2:]) if sent else NUMBERS * samples
    return 8 * ceil(numbers**0.5 / 8)


def is_large(layer: Layer, samples: int, places: int, *, sent: bool = False) -> bool:
    """Whether a layer that mixes its features has many more weights than combinations, and the products take long.

    `places` of each sample are those at which the weights act.
    """
    if samples * places * prod(layer.weight_shape) < WORK[places == 1]:
        return False
    k, (outputs, inputs) = combinations(layer, samples, sent=sent), layer.weight_shape[:2]
    return outputs * inputs >= LARGE * min(outputs, k) * min(inputs, k)


class Sketch(BalancedGradients, Protocol):
    """Per-sample gradients of a large layer, of this process's samples."""

    def combined(self) -> Explicit | RankOne:
        """Gradients of the combinations, whose inner products are K."""

    def effect(self, step: Parts) -> Tensor:
        """<p_u[i], step>: (B,)."""

    def effect_at(self, x: Tensor, step: Parts) -> Tensor:
        """<p_h[i], g(x_i, step)> for other inputs x: (B,)."""

    def know(self, step: Parts, combined: Tensor) -> None:
        """Take the combinations of a step, which are known, unless they are those of another number of samples."""

    def sum_of(self, w: Tensor, eta: float, steps: list[tuple[float, Parts]]) -> Tensor:
        """The combinations of eta M^-1 P_u w and of multiples of other steps together."""


class _KnownSteps(ABC):
    """Combinations of steps, each computed once."""

    balance: Mixing
    k: int

    def __init__(self, shape: tuple[int, ...], dims: tuple[int, int]) -> None:
        self._shape, self._dims = shape, dims  # of the combinations; of a weight, those of inputs and of outputs
        self._known: list[tuple[Parts, Tensor]] = []

    @abstractmethod
    def weighted(self, w: Tensor) -> Tensor:
        """The combinations of M^-1 P_u w, from those of the gradients."""

    def know(self, step: Parts, combined: Tensor) -> None:
        if combined.shape == self._shape:
            self._known.append((step, in_precision(combined, step[0].dtype)))

    def of_step(self, step: Parts) -> Tensor:
        """Those of the weight alone."""
        for known, combined in self._known:
            if known is step:
                return combined
        [weight] = self.balance.scale_kernel(step[:1], -1)
        combined = _step_combined(self._dims, self.balance, weight, self.k)
        self._known.append((step, combined))
        return combined

    def sum_of(self, w: Tensor, eta: float, steps: list[tuple[float, Parts]]) -> Tensor:
        total = self.weighted(w).mul_(eta)
        for share, step in steps:
            total.add_(self.of_step(step), alpha=share)
        return total


class Sketched(OneGradient, _KnownSteps):
    """A layer whose weights act at several places of each sample: explicit gradients of a smaller one."""

    balance: Mixing

    def __init__(self, layer: Linear | Conv, x: Tensor, p: Tensor, balance: Mixing, k: int) -> None:
        # the bias, for which no combinations are needed, is kept apart
        super().__init__(replace(layer, bias=False) if layer.bias else layer, x, p, balance)
        self.k = k
        shape = (min(layer.weight_shape[0], k), min(layer.weight_shape[1], k), *layer.weight_shape[2:])
        in_basis = balance.of(layer)
        assert isinstance(in_basis, (Linear, Conv))
        self.small = replace(in_basis, weight_shape=shape, bias=False)
        _KnownSteps.__init__(self, shape, layer.weight_dims)
        dim = layer.feature_dims[1]
        assert dim is not None
        self._p = _combined(balance.output_root, p, dim, self.k)
        self._sums = layer.rows(p).sum((1, 2)) if layer.bias else None  # (B, O)
        self._explicit: Explicit | None = None

    def _inputs(self, x: Tensor) -> Tensor:
        dim = self.layer.feature_dims[0]
        assert dim is not None
        return _combined(self.balance.input_root, x, dim, self.k)

    def combined(self) -> Explicit:
        if self._explicit is None:
            self._explicit = Explicit(self.small, self._inputs(self.x), self._p)
            self._explicit.x = EMPTY
            if self._sums is not None:
                self._explicit.bias = self.balance.output_root.isometric(self._sums)
        return self._explicit

    def couple(self, steps: list[Parts]) -> tuple[Tensor, list[Tensor]]:
        return self.combined().gram(IDENTITY), [self.effect(step) for step in steps]

    def effect(self, step: Parts) -> Tensor:
        gradients = self.combined().weight.flatten(1)
        return self._with_bias(gradients @ in_precision(self.of_step(step).flatten(), gradients.dtype), step)

    def weighted(self, w: Tensor) -> Tensor:
        gradients = self.combined().weight.flatten(1)
        return torch.mv(gradients.T, in_precision(w, gradients.dtype)).view(self._shape)

    def effect_at(self, x: Tensor, step: Parts) -> Tensor:
        x = self._inputs(in_precision(x, self.x.dtype))
        effect = per_sample_dot(self._p, self.small.apply(x, [in_precision(self.of_step(step), x.dtype)]))
        return self._with_bias(effect, step)

    def _with_bias(self, effect: Tensor, step: Parts) -> Tensor:
        return effect if self._sums is None else effect.addmv_(self._sums, step[1])

    def combine(self, w: Tensor) -> Parts:
        found = super().combine(w)
        if self._sums is None:
            return found
        return [*found, self.balance.output_root.times(torch.mv(self._sums.T, in_precision(w, self._sums.dtype)), 0, 2)]


class SketchedProducts(OuterProducts, _KnownSteps):
    """A linear layer on (B, n) inputs: inner products of the combinations, each sample's with its exact norm."""

    def __init__(self, layer: Linear, x: Tensor, p: Tensor, balance: Mixing, k: int) -> None:
        self.layer, self.x, self.p, self.balance, self.k = layer, x, p, balance, k
        self._x, self._p = self._inputs(x), _combined(balance.output_root, p, -1, self.k)
        self._inside_x = balance.input_root.inside(x, self._x)
        self._inside_p = balance.output_root.inside(p, self._p)
        _KnownSteps.__init__(self, (self._p.shape[1], self._x.shape[1]), layer.weight_dims)

    def _inputs(self, x: Tensor) -> Tensor:
        return _combined(self.balance.input_root, x, -1, self.k)

    def combined(self) -> RankOne:
        x = _with_norms(self._x, self.balance.input_root.squares(self.x, self._inside_x))
        p = _with_norms(self._p, self.balance.output_root.squares(self.p, self._inside_p))
        return RankOne(replace(self.layer, weight_shape=(p.shape[1], x.shape[1])), x, p)

    def couple(self, steps: list[Parts]) -> tuple[Tensor, list[Tensor]]:
        return self.combined().gram(IDENTITY), [self.effect(step) for step in steps]

    def raised(self) -> tuple[Tensor, Tensor]:
        roots = self.balance.input_root, self.balance.output_root
        return roots[0].squared(self.x, self._inside_x), roots[1].squared(self.p, self._inside_p)

    def effect(self, step: Parts) -> Tensor:
        return self._effect(self._x, step)

    def effect_at(self, x: Tensor, step: Parts) -> Tensor:
        return self._effect(self._inputs(in_precision(x, self.x.dtype)), step)

    def _effect(self, combined: Tensor, step: Parts) -> Tensor:
        weight = in_precision(self.of_step(step), combined.dtype)
        effect = torch.linalg.vecdot(self._p, combined @ weight.T)
        return effect.addmv_(self.p, step[1]) if len(step) > 1 else effect

    def weighted(self, w: Tensor) -> Tensor:
        return scale_samples(w, self._p).T @ self._x


def _combined(root: Root, a: Tensor, dim: int, k: int) -> Tensor:
    """Combinations of balanced features, or all of them where they are no more."""
    return root.sketch(a, dim, k) if a.shape[dim] > k else root.times(a, dim)


def _step_combined(dims: tuple[int, int], balance: Mixing, weight: Tensor, k: int) -> Tensor:
    """The same combinations of a step in the weight; of the outputs first, which are in front: no copy is needed."""
    for root, dim in ((balance.output_root, dims[1]), (balance.input_root, dims[0])):
        many = weight.shape[dim] > k
        weight = root.sketch(weight, dim, k, inverse=True) if many else root.times(weight, dim, -1)
    return weight


def _with_norms(combined: Tensor, squares: Tensor) -> Tensor:
    """Combinations of each sample's features, scaled to the norm of all of them, <a, R^2 a>^1/2."""
    own = torch.linalg.vecdot(combined, combined).clamp_min_(torch.finfo(combined.dtype).tiny)
    return combined * (squares.clamp_min(0) / own).sqrt_()[:, None]
