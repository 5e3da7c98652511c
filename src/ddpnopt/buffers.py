"""Memory that stays from step to step: fetching it anew would cost more than what is done with it."""

from __future__ import annotations

import torch
from torch import Tensor

from ddpnopt.layers import Parts

RETAINED = 31 * 2**20  # bytes; 32 MB is the most that glibc takes notice of


class Buffers:
    """Where the weights of each layer are copied to before they are changed."""

    def __init__(self) -> None:
        self._of: dict[Tensor, Parts] = {}

    def copy(self, key: Tensor, weights: Parts) -> Parts:
        """The weights as they are now, until the next call."""
        found = self._of.get(key)
        if found is None or not all(map(_alike, found, weights)) or len(found) != len(weights):
            found = self._of[key] = [torch.empty_like(w) for w in weights]
        torch._foreach_copy_(found, weights)
        return found


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device


def retain_freed() -> None:
    """Let the process keep the memory that a step gives back until the next one asks for it.

    glibc returns free memory to the system beyond twice the largest block that it has seen freed. Optimizers that read
    `.grad` free blocks of the weights' size in every step; ours frees activations, at most, so that each step would
    fetch its memory anew, page by page, which takes longer than most operations on it. One block, untouched, will do.
    """
    torch.empty(RETAINED, dtype=torch.uint8)
