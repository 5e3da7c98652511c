"""How exact a match must be, and how many numbers must match, before a loss counts as recognised."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
ROUND = tuple(k / 10 for k in range(10, 100))  # first digits of factors that people write
COARSE = (1.0, 2.0, 5.0)  # where the precision does not separate more


@cache
def tolerance(*dtypes: torch.dtype) -> float:
    """How far a gradient may be off, in units of the largest, when it was computed in these precisions."""
    return max(TOLERANCE.get(dtype, 1e-4) for dtype in dtypes)


def enough(tol: float) -> int:
    """How many numbers must agree, apart from those that were fitted: chance alone would do it once in 1e8."""
    return max(3, math.ceil(8 / -math.log10(tol)))


def says_something(q: Tensor, weight: float, tol: float) -> bool:
    """Whether a gradient w (p - t) is large enough to tell hard targets from saturated outputs of any loss."""
    return largest(q) > 5 * tol * weight


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
    counts = {1, q.numel(), len(q), q.numel() // q.shape[-1]}
    if any(is_round(weight * count, tol) for count in counts):
        return True
    live = int(q.count_nonzero())
    if live == q.numel():  # so that all samples have a gradient
        return False
    more = {live, int(q.reshape(len(q), -1).any(1).count_nonzero())} - counts
    return any(is_round(weight * count, tol) for count in more)


def shared_magnitude(q: Tensor, tol: float) -> bool:
    """Whether many gradients have the largest magnitude: a loss with linear parts (L1, Huber, hinge)."""
    top = largest(q)
    if not top > 0:
        return False
    at_top = int((q.abs() >= top * (1 - tol / 10)).count_nonzero())
    return at_top >= max(enough(tol), 0.05 * q.numel())


def within_reach(z: Tensor, q: Tensor, squares: Tensor | None = None) -> float:
    """What the loss would lose, to first order, if the outputs went down their gradient by half of their own spread.

    `squares` are |q_i|^2 of each sample in double precision, where they are known.
    """
    rows = z.reshape(len(z), -1).double()
    spread = _size(rows - rows.mean(0)) or _size(rows)
    spread = spread / math.sqrt(len(z)) or 1.0
    return 0.5 * spread * float((squares_of_samples(q) if squares is None else squares).sqrt().sum())


def squares_of_samples(q: Tensor) -> Tensor:
    """|q_i|^2 of each sample, in double precision: (B,)."""
    return torch.linalg.vector_norm(q.reshape(len(q), -1), dim=1, dtype=torch.float64).square_()


def _size(rows: Tensor) -> float:
    return float(torch.linalg.vector_norm(rows))


def largest(q: Tensor) -> float:
    """The largest magnitude: much faster than the norm."""
    least, most = q.aminmax()
    return max(-float(least), float(most))
