"""Memory that stays from step to step: fetching it anew would cost more than what is done with it."""

from __future__ import annotations

import torch
from torch import Tensor

RETAINED = 31 * 2**20  # bytes; 32 MB is the most that glibc takes notice of


class Buffers:
    """Where each weight is copied to before it is changed."""

    def __init__(self) -> None:
        self._of: dict[Tensor, Tensor] = {}

    def copy(self, p: Tensor) -> Tensor:
        """The weight as it is now, until the next call."""
        found = self._of.get(p)
        if found is None or found.shape != p.shape or found.dtype != p.dtype or found.device != p.device:
            found = self._of[p] = torch.empty_like(p, requires_grad=False)
        return found.copy_(p.detach())


def retain_freed() -> None:
    """Let the process keep the memory that a step gives back until the next one asks for it.

    glibc returns free memory to the system beyond twice the largest block that it has seen freed. Optimizers that read
    `.grad` free blocks of the weights' size in every step; ours frees activations, at most, so that each step would
    fetch its memory anew, page by page, which takes longer than most operations on it. One block, untouched, will do.
    """
    torch.empty(RETAINED, dtype=torch.uint8)
