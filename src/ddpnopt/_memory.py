"""Memory that stays from step to step: fetching it anew would cost more than what is done with it."""

from __future__ import annotations

import torch

RETAINED = 31 * 2**20  # bytes; 32 MB is the most that glibc takes notice of


def retain_freed() -> None:
    """Let the process keep the memory that a step gives back until the next one asks for it.

    glibc returns free memory to the system beyond twice the largest block that it has seen freed. Optimizers that read
    `.grad` free blocks of the weights' size in every step; ours frees activations, at most, so that each step would
    fetch its memory anew, page by page, which takes longer than most operations on it. One block, untouched, will do.
    """
    torch.empty(RETAINED, dtype=torch.uint8)
