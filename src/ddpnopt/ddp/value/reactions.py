"""How the layers react to their new inputs in the forward sweep, and how far they may."""

from __future__ import annotations

import torch
from torch import Tensor


class Reactions:
    """The weights of the samples that the stages ask for, against those of the plan (`ddp.rollouts`)."""

    def __init__(self, plan: Tensor) -> None:
        self.plan = plan  # (N,)
        self._size = torch.linalg.vector_norm(plan)
        self._seen: list[Tensor] = []

    def take(self, w: Tensor) -> Tensor:
        """Take in what a stage asks for; that, or the plan where they differ by more than the size of the plan.

        A reaction corrects the plan. One that is larger answers a change of the inputs that is none to first order (a
        code that flips, a unit that dies), and would fit the weights to the places where the samples of this batch are.
        """
        self._seen.append(w)
        return torch.where(torch.linalg.vector_norm(w - self.plan) <= self._size, w, self.plan)

    def relative(self) -> float:
        """How far the stages have differed from the plan, relative to it."""
        found, self._seen, size = self._seen, [], float(self._size)
        if not found or size <= 0:
            return 0.0
        return float(torch.linalg.vector_norm(torch.stack(found).sub_(self.plan))) / size / len(found) ** 0.5
