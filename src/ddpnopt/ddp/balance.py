"""A change of variables for each layer that makes the step independent of the scales of inputs and outputs.

With A and G the second moments of the input features and of the gradients at the outputs,

    x' = A^-1/4 x        p' = G^-1/4 p        du = G^-1/4 du' A^-1/4

a step in the new variables is one with the metric M = A^1/2 (x) G^1/2: the geometric mean of none and of K-FAC's, the
power of Shampoo's. Only the *profiles* of A and G matter here, each divided by its mean: the size of the step is the
value function's concern. They are running averages, the memory of former batches. Where features are not mixed
(groups, embeddings) A and G are diagonal: a factored form of Adam's second moments, as in Adafactor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from ddpnopt._distributed import Peers
from ddpnopt.ddp.covariance import DENSE, Root, note_scale, observe, root, scale
from ddpnopt.linear.layer import Layer, Parts

DECAY = 0.95  # of the running averages: they cover the first twenty steps, and about the last forty later
LATER = 2  # steps that count as one of the first ones
EVERY_STEP = 20  # steps in which each batch may be looked at; after them every REFRESH-th at most
REFRESH = 4
LONGEST = 16  # steps from one look to the next where looks change little
STEADY = 0.07  # relative change of the metric by a look: with less the next one comes later
FLOOR = 0.01  # of a mean square, relative to their mean: a silent feature is not amplified without bound
LOW = 0.002  # … of matrices of output gradients: a silent input may become loud, small gradients harm no loss
ALIKE = 1e-3  # relative to a gradient: how far it may be from a multiple of the weights
POWER = -0.25  # of a mean square: 1/4 on each side of the Gram matrix is M^1/2


class Balance(ABC):
    """The variables of one layer in one step.

    The places of a kernel are no dimension of the inputs: whatever variables these are in, it is the layer itself that
    has weights in another basis of them, and gradients by such weights.
    """

    kernel_root: Root | None

    @abstractmethod
    def inputs(self, x: Tensor, times: int = 1) -> Tensor:
        """x', or with `times` 2 the factor once more: like x."""

    @abstractmethod
    def outputs(self, p: Tensor, times: int = 1) -> Tensor:
        """p', or with `times` 2 the factor once more: like h."""

    def of(self, layer: Layer) -> Layer:
        """The layer with the places of its kernel in balanced variables."""
        return layer if self.kernel_root is None else layer.in_basis(self.kernel_root.power(1))

    def scale_kernel(self, u: Parts, times: int = 1) -> Parts:
        """The part of `scale` that belongs to the places of the kernel."""
        if self.kernel_root is None:
            return u
        weight = u[0]
        if weight.is_contiguous():
            return [self.kernel_root.times(weight.flatten(2), -1, times).view(weight.shape), *u[1:]]
        behind = weight.movedim(1, -1)  # channels last in memory
        return [self.kernel_root.times(behind.flatten(1, -2), 1, times).view(behind.shape).movedim(-1, 1), *u[1:]]

    @abstractmethod
    def scale(self, u: Parts, times: int = 1) -> Parts:
        """From gradients in u to gradients in u', and from steps in u' to steps in u.

        With `times` -1 back, with 2 from a gradient in u to the step in u.
        """

    @abstractmethod
    def held_step(self, gradient: Tensor, size: Tensor, k: int, rate: float) -> Tensor:
        """(1 / rate + M^-1 c)^-1 M^-1 gradient in parameter k, which does not overshoot for any curvature c.

        That is |gradient| / size, for each number. `size` are the numbers of the parameter without their signs.
        """


@dataclass(eq=False)
class Diagonal(Balance):
    """A factor for each feature; None where a layer has no features of different scale."""

    xi: Tensor | None  # of the input features, to be multiplied with x
    psi: Tensor | None  # of the outputs, to be multiplied with p
    make_factors: Callable[[], Parts]
    kernel_root: Root | None = None

    @cached_property
    def factors(self) -> Parts:
        """psi o . o xi for weight and bias, broadcast."""
        return self.make_factors()

    def inputs(self, x: Tensor, times: int = 1) -> Tensor:
        return x if self.xi is None else x * (self.xi if times == 1 else self.xi**times)

    def outputs(self, p: Tensor, times: int = 1) -> Tensor:
        return p if self.psi is None else p * (self.psi if times == 1 else self.psi**times)

    def scale(self, u: Parts, times: int = 1) -> Parts:
        u = self.scale_kernel(u, times)
        if times == -1:
            return [part / factor for part, factor in zip(u, self.factors, strict=True)]
        return [part * (factor if times == 1 else factor**times) for part, factor in zip(u, self.factors, strict=True)]

    def held_step(self, gradient: Tensor, size: Tensor, k: int, rate: float) -> Tensor:
        kernel = self.kernel_root.mean_square if k == 0 and self.kernel_root is not None else 1.0
        return _held(gradient, size, rate * kernel * self.factors[k] ** 2)


@dataclass(eq=False)
class Mixing(Balance):
    """A matrix for the input features and one for the outputs."""

    layer: Layer
    input_root: Root
    output_root: Root
    kernel_root: Root | None = None

    @classmethod
    def known(cls, layer: Layer, state: dict[str, Any]) -> Mixing:
        """From the roots that `state` keeps."""
        kernel = state.get("kernel_root")
        return cls(
            layer, Root(state["input_root"]), Root(state["output_root"]), None if kernel is None else Root(kernel)
        )

    def inputs(self, x: Tensor, times: int = 1) -> Tensor:
        dim = self.layer.feature_dims[0]
        assert dim is not None
        return self.input_root.times(x, dim, times)

    def outputs(self, p: Tensor, times: int = 1) -> Tensor:
        dim = self.layer.feature_dims[1]
        assert dim is not None
        return self.output_root.times(p, dim, times)

    def scale(self, u: Parts, times: int = 1) -> Parts:
        return self.scale_outputs(self.scale_inputs(self.scale_kernel(u, times), times), times)

    def scale_inputs(self, u: Parts, times: int = 1) -> Parts:
        """The part of `scale` that belongs to the input features."""
        return [self.input_root.times(u[0], self.layer.weight_dims[0], times), *u[1:]]

    def scale_outputs(self, u: Parts, times: int = 1) -> Parts:
        """The part of `scale` that belongs to the outputs."""
        root = self.output_root
        return [root.times(u[0], self.layer.weight_dims[1], times), *(root.times(part, 0, times) for part in u[1:])]

    def held_step(self, gradient: Tensor, size: Tensor, k: int, rate: float) -> Tensor:
        c, roots = gradient.norm() / size.norm(), self._roots(k)
        if (gradient.abs() - c * size).norm() > ALIKE * gradient.norm():  # not that of a sum of squares
            for root, _ in roots:
                rate *= root.mean_square
            return _held(gradient, size, rate)
        found = gradient.flatten(2) if gradient.dim() > 2 else gradient
        squares = gradient.new_tensor(rate)
        for root, dim in roots:
            found, of_root = root.apart(found, dim)
            squares = squares[..., None] * of_root
        found = squares * found / (1 + squares * c)
        for root, dim in reversed(roots):
            found = root.together(found, dim)
        return found.reshape(gradient.shape)

    def _roots(self, k: int) -> list[tuple[Root, int]]:
        """Those of parameter k and its dimensions, the last one first: what is behind a dimension does not move it."""
        if k:
            return [(self.output_root, 0)]
        inputs, outputs = self.layer.weight_dims
        found = [(self.input_root, inputs), (self.output_root, outputs)]
        found += [(self.kernel_root, 2)] if self.kernel_root is not None else []
        return sorted(found, key=lambda each: -each[1])


def _held(gradient: Tensor, size: Tensor, rate: Tensor | float) -> Tensor:
    return rate * gradient / (1 + rate * gradient.abs() / size)


# A layer multiplies its bias by 1. A factor makes that input as large as the others, whose common scale then has no
# effect; the layer does not apply it, so it goes to the other side.


def balanced(layer: Layer, x: Tensor, p: Tensor, state: dict[str, Any], peers: Peers, name: str = "") -> Balance:
    """The factors for inputs x and output gradients p; `state` keeps the running profiles and factors."""
    input_dim, output_dim = layer.feature_dims
    if look(layer, x, p, state, peers, name):
        return Mixing.known(layer, state)
    xi, psi = state.get("input_factor"), state.get("output_factor")
    factors = partial(layer.outer_factors, xi, psi)
    return Diagonal(_along(xi, x, input_dim), _along(psi, p, output_dim), factors, _kernel_root(state))


def _kernel_root(state: dict[str, Any]) -> Root | None:
    return Root(state["kernel_root"]) if "kernel_root" in state else None


def look(layer: Layer, x: Tensor, p: Tensor, state: dict[str, Any], peers: Peers, name: str = "") -> bool:
    """Take x and p into the running profiles where a look at them is due; whether the layer mixes features."""
    input_dim, output_dim = layer.feature_dims
    steps = state["balance_looks"] = state.get("balance_looks", 0) + 1
    since = steps - state.get("last_look", steps - 1)  # which states of earlier versions do not have
    mixes = layer.mixes_features and input_dim is not None and output_dim is not None
    if since < state.get("look_every", 1):
        return mixes
    state["last_look"] = steps
    # what was seen long ago counts as little after rare looks as after many
    decay = DECAY ** (since if steps <= EVERY_STEP else since / LATER)
    balanced_places = 1 < layer.kernel_places <= DENSE  # products with a larger matrix would take longer than the layer
    change = _observe_kernel(layer, x, state, peers, name, decay) if balanced_places else 0.0
    if input_dim is not None and output_dim is not None and mixes:
        change = max(change, _observe_moments(x, p, input_dim, output_dim, state, peers, name, decay))
        state["look_every"] = _next_look(steps, state.get("look_every", 1), change, peers)
    else:
        _observe(x, p, input_dim, output_dim, state, peers, decay)
        state["look_every"] = 1 if steps < EVERY_STEP else REFRESH
    return mixes


def _next_look(steps: int, every: int, change: float, peers: Peers) -> int:
    """Steps until the next look, which is to change the metric by STEADY; all processes look at the same steps."""
    least = 1 if steps < EVERY_STEP else REFRESH
    change = peers.mean(change)  # they may round differently, and have to agree
    return max(least, min(LONGEST, int(every * min(2.0, STEADY / max(change, 1e-9)))))


def _observe_moments(
    x: Tensor, p: Tensor, input_dim: int, output_dim: int, state: dict[str, Any], peers: Peers, name: str, decay: float
) -> float:
    """Update the running second moments and the roots that follow from them; the relative change of the metric."""
    observe(x, input_dim, state, "input", decay, peers)
    observe(p, output_dim, state, "output", decay, peers)
    column = scale(state, "input")
    changes = [
        _renew(side, a, dim, factor, state, name)
        for side, a, dim, factor in (("input", x, input_dim, 1 / column), ("output", p, output_dim, column))
    ]
    state.pop("combined_update", None)
    return max(changes)


def _renew(side: str, a: Tensor, dim: int, factor: float, state: dict[str, Any], name: str) -> float:
    """Compute the root of one side again where it has changed; by how much."""
    found, change = root(state, side, a, a.shape[dim], LOW if side == "output" else FLOOR, POWER, factor)
    found.kept["seed"] = crc32((name + side).encode(), state["balance_looks"])  # other combinations at each look
    state[side + "_root"] = found.kept
    return change


def _observe_kernel(layer: Layer, x: Tensor, state: dict[str, Any], peers: Peers, name: str, decay: float) -> float:
    """The same for what a kernel sees of each input feature."""
    seen = layer.kernel_inputs(x)
    observe(seen, -1, state, "kernel", decay, peers)
    return _renew("kernel", seen, -1, 1.0, state, name)


def _observe(
    x: Tensor,
    p: Tensor,
    input_dim: int | None,
    output_dim: int | None,
    state: dict[str, Any],
    peers: Peers,
    decay: float,
) -> None:
    """Update the running profiles and the factors that follow from them."""
    if output_dim is not None:
        state["output_factor"] = _factor(p, output_dim, state, "output", peers, decay)
    if input_dim is not None:
        factor, column = _factor(x, input_dim, state, "input", peers, decay), scale(state, "input")
        state["input_factor"], state["output_factor"] = factor / column, state["output_factor"] * column


def _factor(a: Tensor, dim: int, state: dict[str, Any], side: str, peers: Peers, decay: float) -> Tensor:
    """The factors of all features of a."""
    kept = dim % a.dim()
    others = [d for d in range(a.dim()) if d != kept]
    squares = torch.linalg.vector_norm(a, dim=others).square_()
    share = a.shape[kept] / max(1, a.numel())
    if not peers.alone:
        squares = peers.sum([squares * (share * peers.share(len(a)))])[0]
        share = 1.0
    mean = max(share * float(squares.mean()), torch.finfo(squares.dtype).tiny)
    note_scale(state, side, mean, decay)
    new = squares.mul_(share / mean * (1 - decay))
    old = state.get(side + "_profile")
    running = state[side + "_profile"] = new if old is None else new.add_(old, alpha=decay)
    weight = state[side + "_weight"]
    return torch.add(running, FLOOR * weight).mul_(1 / weight).pow_(POWER)


def _along(factor: Tensor | None, like: Tensor, dim: int | None) -> Tensor | None:
    """A factor per feature, to be multiplied with `like`."""
    if factor is None or dim is None:
        return None
    if dim == -1:
        return factor
    shape = [1] * like.dim()
    shape[dim] = -1
    return factor.view(shape)
