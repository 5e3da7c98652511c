"""A change of variables for each layer that makes the step independent of the scales of inputs and outputs.

With xi and psi the inverse fourth roots of the mean squares of each input feature and of each output's gradient,

    x' = xi o x        p' = psi o p        du = psi o du' o xi

a step in the new variables is one with the metric M = A^1/2 (x) G^1/2, A and G the diagonals of the two mean squares:
the factored form of Adam's second moments (as in Adafactor), at the cost of the identity. Only the *profiles* of A and
G matter here, each divided by its mean: the size of the step is the value function's concern. They are running
averages, the memory of former batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddpnopt._distributed import Peers
from ddpnopt.linear.layer import Layer, Parts

DECAY = 0.95  # of the running averages: they cover about the last twenty batches
FLOOR = 0.01  # of a mean square, relative to their mean: a silent feature is not amplified without bound
POWER = -0.25  # of a mean square: 1/4 on each side of the Gram matrix is M^1/2


@dataclass(frozen=True)
class Balance:
    """The factors of one layer in one step."""

    xi: Tensor | None  # of the input features; None where the input has none (indices)
    psi: Tensor  # of the outputs
    factors: Parts  # psi o . o xi for weight and bias, broadcast

    def inputs(self, layer: Layer, x: Tensor) -> Tensor:
        """x': like x."""
        return x if self.xi is None else x * _along(self.xi, x, layer.input_dim)

    def outputs(self, layer: Layer, p: Tensor) -> Tensor:
        """p': like h."""
        return p * _along(self.psi, p, layer.output_dim)

    def scale(self, u: Parts) -> Parts:
        """From gradients in u to gradients in u', and from steps in u' to steps in u."""
        return [part * factor for part, factor in zip(u, self.factors, strict=True)]


def balanced(layer: Layer, x: Tensor, p: Tensor, state: dict[str, Any], peers: Peers) -> Balance:
    """The factors for inputs x and output gradients p; `state` keeps the running profiles."""
    inputs = None
    if x.is_floating_point():
        inputs = _mean_squares(x, layer.input_dim)
        inputs = torch.cat([inputs, inputs.new_ones(1)])  # the bias acts on a constant input
    outputs = _mean_squares(p, layer.output_dim)
    if not peers.alone:
        inputs, outputs = _over_processes(inputs, outputs, len(x), peers)
    outputs = outputs / outputs.mean().clamp_min(torch.finfo(outputs.dtype).tiny)
    weight = state["balance_weight"] = DECAY * state.get("balance_weight", 0.0) + 1 - DECAY
    psi = _factor(state, "output_profile", outputs, weight)
    xi = None
    if inputs is not None:
        inputs = inputs / inputs[:-1].mean().clamp_min(torch.finfo(inputs.dtype).tiny)
        columns = _factor(state, "input_profile", inputs, weight)
        # relative to the bias column, which then keeps its factor 1: what all have in common is part of the step size
        xi = columns[:-1] / columns[-1]
    return Balance(xi, psi, layer.outer_factors(xi, psi))


def _factor(state: dict[str, Any], name: str, new: Tensor, weight: float) -> Tensor:
    old = state.get(name)
    running = new * (1 - DECAY) if old is None else old * DECAY + new * (1 - DECAY)
    state[name] = running
    return (running / weight + FLOOR).pow(POWER)


def _mean_squares(a: Tensor, dim: int) -> Tensor:
    """Over all dimensions but one."""
    kept = dim % a.dim()
    others = [d for d in range(a.dim()) if d != kept]
    return torch.linalg.vector_norm(a, dim=others).square() * (a.shape[kept] / max(1, a.numel()))


def _over_processes(inputs: Tensor | None, outputs: Tensor, samples: int, peers: Peers) -> tuple[Tensor | None, Tensor]:
    mine = [outputs] if inputs is None else [outputs, inputs]
    found = peers.sum([part * peers.share(samples) for part in mine])
    return (None if inputs is None else found[1]), found[0]


def _along(factor: Tensor, like: Tensor, dim: int) -> Tensor:
    shape = [1] * like.dim()
    shape[dim] = -1
    return factor.view(shape)
