"""Memory that stays from step to step: fetching it anew would cost more than what is done with it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

RETAINED = 31 * 2**20  # bytes; 32 MB is the most that glibc takes notice of


def retain_freed() -> None:
    """Let the process keep the memory that a step gives back until the next one asks for it.

    glibc returns free memory to the system beyond twice the largest block that it has seen freed. Optimizers that read
    `.grad` free blocks of the weights' size in every step; ours frees activations, at most, so that each step would
    fetch its memory anew, page by page, which takes longer than most operations on it. One block, untouched, will do.
    """
    torch.empty(RETAINED, dtype=torch.uint8)


def copies(tensors: list[Tensor]) -> list[Tensor]:
    """A copy of each; in one piece where that can be, two calls for all of them."""
    if len({t.dtype for t in tensors}) != 1 or not all(t.is_contiguous() for t in tensors):
        return [t.detach().clone() for t in tensors]
    return list(_unflatten_dense_tensors(_flatten_dense_tensors(tensors), tensors))
