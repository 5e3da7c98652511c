"""Adam without a learning rate, for parameters without feedback: the length of a step follows from the way travelled.

With x_0 the initial parameters and g_k the gradients, a convex loss obeys sum <g_k, x_0 - x_k> <= D |sum g_k|, where D
is the distance from x_0 to the solution: the left side over the right is a lower bound d of it, which only grows. Adam
with d as its learning rate is the method Prodigy (Mishchenko and Defazio, 2023). Here d starts from a share of the
parameters' own size, so that nothing depends on their unit, and gradients enter divided by their running size: a
loss that is multiplied by a number gives the same steps.

The bound is one of convex losses. Elsewhere it can grow without end (the deviation of a policy, which sharpens its own
gradients; the logarithm of a scale). So no parameter changes by a larger share of its size than the layers with
feedback do, whose lengths are judged.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

FIRST, SECOND = 0.9, 0.99  # of the running means of gradients and of their squares
START = 1e-2  # of the parameters' root mean square: the first d
LEAST_SIZE = 1e-2  # root mean square of the parameters: those that start at zero can leave it


@dataclass
class Distance:
    """The lower bound d, in units of a parameter, and the running sums behind it."""

    steps: int = 0
    d: float = 0.0
    travelled: float = 0.0  # running sum of d^2 <g, x_0 - x>

    def step(
        self, parameters: list[Tensor], gradients: list[Tensor], states: list[dict[str, Any]], factors: list[float],
        share: float = math.inf,
    ) -> None:  # fmt: skip
        """Update the parameters in place, by no more than a share of their size.

        `factors` (1 unless a scheduler says otherwise) multiply the step.
        """
        self.steps += 1
        if self.d == 0.0:
            squares = sum(float(p.square().sum()) for p in parameters) / max(1, sum(p.numel() for p in parameters))
            self.d = START * max(squares**0.5, LEAST_SIZE)
        decay, weight = SECOND**0.5, 1 - SECOND**0.5
        way, size = 0.0, 0.0
        for p, g, state in zip(parameters, gradients, states, strict=True):
            if "origin" not in state:
                zeros = torch.zeros_like(p)
                state.update(
                    origin=p.clone(), exp_avg=zeros, exp_avg_sq=zeros, weighted_sum=zeros, joined=self.steps - 1
                )
            way += float((g * (state["origin"] - p)).sum())
            # entries are replaced, never changed in place, so that a failed step can be undone
            state["exp_avg"] = FIRST * state["exp_avg"] + (1 - FIRST) * self.d * g
            state["exp_avg_sq"] = SECOND * state["exp_avg_sq"] + (1 - SECOND) * self.d**2 * g.square()
            state["weighted_sum"] = decay * state["weighted_sum"] + weight * self.d**2 * g
            size += float(state["weighted_sum"].abs().sum())
        self.travelled = decay * self.travelled + weight * self.d**2 * way
        last = self.d
        if size > 0:
            self.d = max(self.d, self.travelled / size)
        for p, state, factor in zip(parameters, states, factors, strict=True):
            k = self.steps - state["joined"]
            bias = (1 - SECOND**k) ** 0.5 / (1 - FIRST**k)
            root = state["exp_avg_sq"].sqrt()
            floor = torch.finfo(p.dtype).tiny + 1e-8 * float(root.max())
            length = min(last, share * _size(p, state["origin"])) if share < math.inf else last
            p.addcdiv_(state["exp_avg"], root + floor, value=-factor * length * bias)

    def state(self) -> dict[str, float]:
        """For a checkpoint: plain numbers."""
        return asdict(self)


def _size(p: Tensor, origin: Tensor) -> float:
    """The root mean square of a parameter, and no less than at its start, or than that of a usual start."""
    if p.numel() == 0:
        return 0.0
    inputs = p.shape[-1] if p.dim() > 1 else 1
    usual = (3 * inputs) ** -0.5  # of torch's linear layers
    return max(float(p.square().mean()) ** 0.5, float(origin.square().mean()) ** 0.5, usual)
