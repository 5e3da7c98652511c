"""The average of the weights over the last part of training, which removes the noise of the last few batches.

With or without relaxation, each step of the batch-coupled form fits its own batch well, and the weights keep moving
with the noise. The polynomial decay of Shamir and Zhang (2013), with n = 1, 2, … counting the updates,

    m <- m + (k + 1) / (n + k) (u - m)

covers about the last 1 / (k + 1) of all steps, however many there are: there is nothing to choose. The running
statistics of batch norms are averaged in the same way, so that they fit the averaged weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Norms = Sequence[tuple[str, nn.Module]]
"""Batch norms by name."""

POWER = 8  # k
EVERY = 4  # steps from one update to the next: consecutive weights differ little, and this costs a quarter


class Averaging:
    """Keeps `average` in the state of each parameter, and swaps it with the weights.

    It gets the optimizer as an argument: a reference would keep both, and the hooks, alive after their last use.
    """

    def __init__(self) -> None:
        self.in_use = False  # whether the model holds the averages, and the state the weights

    def update(self, optimizer: Optimizer, count: int, norms: Norms = ()) -> None:
        """Include the new weights in the average, `count` being the number of this update."""
        averages: list[Tensor] = []
        weights: list[Tensor] = []
        for p in _parameters(optimizer):
            state = optimizer.state[p]
            if "average" not in state:
                state["average"] = p.detach().clone()
            else:
                averages.append(state["average"])
                weights.append(p.detach())
        for state, name, buffer in _statistics(optimizer, norms):
            if name not in state:
                state[name] = buffer.clone()
            else:
                averages.append(state[name])
                weights.append(buffer)
        if averages:
            torch._foreach_lerp_(averages, weights, (POWER + 1) / (count + POWER))

    def swap(self, optimizer: Optimizer, norms: Norms = ()) -> None:
        """Put the averages into the model and the weights into the state, or back."""
        self.in_use = not self.in_use
        for p in _parameters(optimizer):
            average = optimizer.state[p].get("average")
            if average is not None:
                _exchange(p.detach(), average)
        for state, name, buffer in _statistics(optimizer, norms):
            if name in state:
                _exchange(buffer, state[name])


def _exchange(a: Tensor, b: Tensor) -> None:
    before = a.clone()
    a.copy_(b)
    b.copy_(before)


def _statistics(optimizer: Optimizer, norms: Norms) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """The running statistics of batch norms, and the state of the norm's scale, which keeps their average."""
    mine = set(_parameters(optimizer))
    for _, norm in norms:
        weight = norm._parameters.get("weight")
        for name in ("running_mean", "running_var"):
            buffer = norm._buffers.get(name)
            if weight is not None and weight in mine and buffer is not None:
                yield optimizer.state[weight], f"average_{name}", buffer


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]
