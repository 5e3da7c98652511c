"""A change of variables for each layer that makes the step independent of the scales of inputs and outputs.

With xi and psi the inverse fourth roots of the mean squares of each input feature and of each output's gradient,

    x' = xi o x        p' = psi o p        du = psi o du' o xi

a step in the new variables is one with the metric M = A^1/2 (x) G^1/2, A and G the diagonals of the two mean squares:
the factored form of Adam's second moments (as in Adafactor), at the cost of the identity. Only the *profiles* of A and
G matter here, each divided by its mean: the size of the step is the value function's concern. They are running
averages, the memory of former batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from ddpnopt._distributed import Peers
from ddpnopt.linear.layer import Layer, Parts

DECAY = 0.95  # of the running averages: they cover about the last twenty looks
EVERY_STEP = 20  # steps in which each batch is looked at; after them every REFRESH-th
REFRESH = 4
FLOOR = 0.01  # of a mean square, relative to their mean: a silent feature is not amplified without bound
POWER = -0.25  # of a mean square: 1/4 on each side of the Gram matrix is M^1/2


@dataclass(frozen=True)
class Balance:
    """The factors of one layer in one step; None where a layer has no features of different scale."""

    xi: Tensor | None  # of the input features, to be multiplied with x
    psi: Tensor | None  # of the outputs, to be multiplied with p
    make_factors: Callable[[], Parts]
    xi_squared: Tensor | None = None  # where known
    psi_squared: Tensor | None = None

    @cached_property
    def factors(self) -> Parts:
        """psi o . o xi for weight and bias, broadcast."""
        return self.make_factors()

    def inputs(self, x: Tensor) -> Tensor:
        """x': like x."""
        return x if self.xi is None else x * self.xi

    def outputs(self, p: Tensor) -> Tensor:
        """p': like h."""
        return p if self.psi is None else p * self.psi

    def inputs_twice(self, x: Tensor) -> Tensor:
        """xi o x'."""
        return x if self.xi is None else x * (self.xi.square() if self.xi_squared is None else self.xi_squared)

    def outputs_twice(self, p: Tensor) -> Tensor:
        """psi o p'."""
        return p if self.psi is None else p * (self.psi.square() if self.psi_squared is None else self.psi_squared)

    def scale(self, u: Parts) -> Parts:
        """From gradients in u to gradients in u', and from steps in u' to steps in u."""
        return [part * factor for part, factor in zip(u, self.factors, strict=True)]

    def unscale(self, u: Parts) -> Parts:
        """From steps in u to steps in u'."""
        return [part / factor for part, factor in zip(u, self.factors, strict=True)]

    def add_scaled(self, u: list[Tensor], step: Parts, alpha: float) -> None:
        """u <- u + alpha times a step in u'."""
        for weight, part, factor in zip(u, step, self.factors, strict=True):
            weight.addcmul_(part, factor, value=alpha)


def balanced(layer: Layer, x: Tensor, p: Tensor, state: dict[str, Any], peers: Peers) -> Balance:
    """The factors for inputs x and output gradients p; `state` keeps the running profiles and factors."""
    input_dim, output_dim = layer.feature_dims
    looks = state["balance_looks"] = state.get("balance_looks", 0) + 1
    if looks <= EVERY_STEP or looks % REFRESH == 0:
        _observe(x, p, input_dim, output_dim, state, peers)
    xi, psi = state.get("input_factor"), state.get("output_factor")
    return Balance(
        _along(xi, x, input_dim), _along(psi, p, output_dim), partial(layer.outer_factors, xi, psi),
        _along(state.get("input_metric"), x, input_dim), _along(state.get("output_metric"), p, output_dim),
    )  # fmt: skip


def _observe(
    x: Tensor, p: Tensor, input_dim: int | None, output_dim: int | None, state: dict[str, Any], peers: Peers
) -> None:
    """Update the running profiles and the factors that follow from them."""
    weight = state["balance_weight"] = DECAY * state.get("balance_weight", 0.0) + 1 - DECAY
    if output_dim is not None:
        state["output_factor"] = _factor(p, output_dim, state, "output_profile", weight, peers)
    if input_dim is not None:
        columns = _factor(x, input_dim, state, "input_profile", weight, peers, constant=True)
        # the layer multiplies its bias by 1: the factor of that column goes to the other side
        state["input_factor"] = columns[:-1] / columns[-1]
        state["output_factor"] = state["output_factor"] * columns[-1]
        state["input_metric"] = state["input_factor"].square()
    if output_dim is not None:
        state["output_metric"] = state["output_factor"].square()


def _factor(
    a: Tensor, dim: int, state: dict[str, Any], name: str, weight: float, peers: Peers, *, constant: bool = False
) -> Tensor:
    """The factors of all features of a; with `constant` also that of an input of ones."""
    kept = dim % a.dim()
    others = [d for d in range(a.dim()) if d != kept]
    squares = torch.linalg.vector_norm(a, dim=others).square_()
    share = a.shape[kept] / max(1, a.numel())
    if not peers.alone:
        squares = peers.sum([squares * (share * peers.share(len(a)))])[0]
        share = 1.0
    mean = max(share * float(squares.mean()), torch.finfo(squares.dtype).tiny)
    new = squares.mul_(share / mean * (1 - DECAY))
    if constant:
        new = torch.cat([new, new.new_full((1,), (1 - DECAY) / mean)])
    old = state.get(name)
    running = state[name] = new if old is None else new.add_(old, alpha=DECAY)
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
