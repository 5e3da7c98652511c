"""Checks of options and numbers, and warnings that point at the user's line."""

from __future__ import annotations

import math
import sys
import warnings
from pathlib import Path

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from ddpnopt.errors import NonFiniteError, OptionError

ADVICE = " Check the batch and the learning rate; on_nonfinite='skip' skips such batches and counts them."
SHOWN = 8  # names in a message
TOGETHER = 2**16  # numbers up to which tensors are concatenated: one call instead of many
LIBRARIES = tuple(str(Path(file).parent) for file in (__file__, torch.__file__))


def require(holds: bool, option: str, value: object, wanted: str) -> None:
    """Raise an error that names the option unless `holds`."""
    if not holds:
        raise OptionError(f"{option}={value!r} is not allowed: it must be {wanted}.")


def listed(names: list[str]) -> str:
    """Names for a message: not more than can be read."""
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def finite_sum(tensors: list[Tensor]) -> float:
    """A number that is finite if and only if all numbers are (except above 1e38); reads each tensor once."""
    if len(tensors) == 1 and tensors[0].dtype == torch.float32:
        return float(tensors[0].sum())
    if any(t.is_complex() for t in tensors):
        tensors = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
    if len(tensors) > 1 and sum(map(Tensor.numel, tensors)) < TOGETHER and len({t.dtype for t in tensors}) == 1:
        tensors = [_flatten_dense_tensors(tensors)]
    sums = [t.sum(dtype=torch.float32 if t.dtype.itemsize < 4 else None) for t in tensors]
    if len(sums) == 1:
        return float(sums[0])
    if len({s.dtype for s in sums}) > 1:
        sums = [s.float() for s in sums]
    return float(torch.stack(sums).sum()) if sums else 0.0


def require_finite(tensors: list[Tensor], what: str, advice: str = "") -> None:
    """Raise `NonFiniteError` if any number is NaN or infinite."""
    if not math.isfinite(finite_sum(tensors)):
        raise not_finite(what, advice)


def not_finite(what: str, advice: str = "") -> NonFiniteError:
    """The error for something that is NaN or infinite."""
    return NonFiniteError(f"{what} is not finite. Weights and state are as they were before this step.{advice}")


def warn_user(message: str, category: type[Warning]) -> None:
    """Warn at the line from which this package, or torch on the way to it, was called."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(LIBRARIES):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
