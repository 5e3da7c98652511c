"""Memory that is kept from step to step: allocating it again would cost more than the operations on it."""

from __future__ import annotations

import torch

RETAINED = 31 * 2**20  # bytes; glibc takes blocks of up to 32 MB into account


def retain_freed() -> None:
    """Let the process keep the memory that a step frees until the next one needs it.

    glibc returns free memory to the system beyond twice the largest block freed so far. Optimizers that use `.grad`
    free blocks of the weights' size in every step; this one frees activations at most, so that each step would allocate
    its memory again, page by page, which takes longer than most operations on it. One untouched block prevents this.
    """
    torch.empty(RETAINED, dtype=torch.uint8)
