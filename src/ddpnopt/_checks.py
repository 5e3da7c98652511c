"""Whether all numbers are finite, found out by reading each once."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from ddpnopt.errors import NonFiniteError

ADVICE = " Look at the batch and the learning rate; on_nonfinite='skip' leaves such batches out and counts them."


TOGETHER = 2**16  # numbers


def finite_sum(tensors: list[Tensor]) -> float:
    """A number that is finite exactly if all numbers are (but for one beyond 1e38); reads each tensor once."""
    if sum(map(Tensor.numel, tensors)) < TOGETHER and len({t.dtype for t in tensors}) == 1:
        tensors = [_flatten_dense_tensors(tensors)]  # one call for all, where calls are what takes time
    sums = [t.sum(dtype=torch.float32 if t.dtype.itemsize < 4 else None) for t in tensors]
    if len(sums) == 1:
        return float(sums[0])
    if len({s.dtype for s in sums}) > 1:
        sums = [s.float() for s in sums]
    return float(torch.stack(sums).sum()) if sums else 0.0


def require_finite(tensors: list[Tensor], what: str, advice: str = "") -> None:
    """Raise `NonFiniteError` if any number is NaN or infinite."""
    check_finite(finite_sum(tensors), what, advice)


def check_finite(total: float, what: str, advice: str = "") -> None:
    """`require_finite` for a `finite_sum`."""
    if not math.isfinite(total):
        raise NonFiniteError(f"{what} is not finite. Weights and state are as they were before this step.{advice}")
