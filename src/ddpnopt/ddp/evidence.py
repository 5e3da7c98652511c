"""How exact a match must be, and how many numbers must match, before a loss counts as recognised."""

from __future__ import annotations

import math

import torch
from torch import Tensor

TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
ROUND = tuple(k / 10 for k in range(10, 100))  # first digits of factors that people write
COARSE = (1.0, 2.0, 5.0)  # where the precision does not separate more


def tolerance(*dtypes: torch.dtype) -> float:
    """How far a gradient may be off, in units of the largest, when it was computed in these precisions."""
    return max(TOLERANCE.get(dtype, 1e-4) for dtype in dtypes)


def enough(tol: float) -> int:
    """How many numbers must agree, apart from those that were fitted: chance alone would do it once in 1e8."""
    return max(3, math.ceil(8 / -math.log10(tol)))


def says_something(q: Tensor, weight: float, tol: float) -> bool:
    """Whether a gradient w (p - t) is large enough to tell hard targets from saturated outputs of any loss."""
    return float(torch.linalg.vector_norm(q, math.inf)) > 5 * tol * weight


def is_round(factor: float, tol: float, first_digits: tuple[float, ...] = ()) -> bool:
    """Whether a factor is one that people write: 2, 0.05, 1/3, 1/32, …, or begins with one of the given digits."""
    if not 1e-300 < factor < 1e300:  # beyond that a power of two, or the inverse, is not a float
        return False
    fine = tol < 1e-3
    rel = tol / 10 if fine else tol / 3
    digits = first_digits or (ROUND if fine else COARSE)
    for number in (factor, 1 / factor):
        first = number / 10.0 ** math.floor(math.log10(number) + rel)
        if digits is ROUND:  # the nearest is enough, and there are many
            near = min(99, max(10, round(10 * first))) / 10
            if abs(first - near) <= rel * near:
                return True
        elif any(abs(first - digit) <= rel * digit for digit in digits):
            return True
        power = 2.0 ** round(math.log2(number))
        if not first_digits and 1 <= power <= 1024 and abs(number - power) <= rel * power:
            return True
    return False


def has_usual_scale(weight: float, q: Tensor, tol: float) -> bool:
    """Whether a weight is a round number over a number of elements, places or samples, all or those with gradient."""
    rows = q.reshape(len(q), -1).any(1)
    counts = {1, q.numel(), len(q), q.numel() // q.shape[-1], int(q.count_nonzero()), int(rows.count_nonzero())}
    return any(is_round(weight * count, tol) for count in counts)


def shared_magnitude(q: Tensor, tol: float) -> bool:
    """Whether many gradients have the largest magnitude: a loss with linear parts (L1, Huber, hinge)."""
    size = q.abs()
    top = size.amax()
    at_top = int((size >= top * (1 - tol / 10)).sum())
    return bool(top > 0) and at_top >= max(enough(tol), 0.05 * q.numel())


def within_reach(z: Tensor, q: Tensor) -> float:
    """What the loss would lose, to first order, if the outputs went down their gradient by half of their own spread."""
    rows = z.reshape(len(z), -1).double()
    spread = float((rows - rows.mean(0)).norm(dim=1).square().mean().sqrt())
    spread = spread or float(rows.norm(dim=1).square().mean().sqrt()) or 1.0
    return 0.5 * spread * float(q.reshape(len(q), -1).double().norm(dim=1).sum())
