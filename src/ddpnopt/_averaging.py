"""The average of the weights over the last part of training: it takes out what they owe to the last few batches.

With relaxation or without, each step of the batch-coupled form fits its own batch well, and the weights go on moving
with the noise. The polynomial decay of Shamir and Zhang (2013), with n = 1, 2, … counting the updates,

    m <- m + (k + 1) / (n + k) (u - m)

covers about the last 1 / (k + 1) of all steps, however many there will be: there is nothing to choose.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

POWER = 8  # k
EVERY = 4  # steps from one update to the next: neighbours differ little, and one in four costs a fourth


class Averaging:
    """Keeps `average` in the state of each parameter, and changes places with it.

    It is handed the optimizer each time: a reference would keep both alive, and the hooks, after their last use.
    """

    def __init__(self) -> None:
        self.in_use = False  # whether the model holds the averages, and the state the weights

    def after_step(self, optimizer: Optimizer, steps: int) -> None:
        """Take the new weights into account, `steps` being the number of all steps up to here."""
        if steps % EVERY:
            return
        averages: list[Tensor] = []
        weights: list[Tensor] = []
        for p in _parameters(optimizer):
            state = optimizer.state[p]
            if "average" not in state:
                state["average"] = p.detach().clone()
            else:
                averages.append(state["average"])
                weights.append(p.detach())
        if averages:
            torch._foreach_lerp_(averages, weights, (POWER + 1) / (steps // EVERY + POWER))

    def swap(self, optimizer: Optimizer) -> None:
        """Averages into the model and weights into the state, or back."""
        self.in_use = not self.in_use
        for p in _parameters(optimizer):
            average = optimizer.state[p].get("average")
            if average is not None:
                weight = p.detach().clone()
                p.detach().copy_(average)
                average.copy_(weight)


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]
