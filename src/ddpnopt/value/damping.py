"""How much the algebra on B x B matrices is damped: by the learning rate, and by what a batch can tell.

A step solves (d I + A) y = r, A = L^1/2 S L^1/2, where d = 1 is what the learning rate asks for. Its effective degrees
of freedom are those of a ridge regression on the batch,

    tr A (A + d I)^-1  =  N - d |C^-1|^2,        C C' = A + d I,        N the size of A

With a large learning rate they come near B: every sample is fitted, noise and all, at the expense of those in other
batches. So d is raised until they are at most `dof` for each of the B samples. Relative to the mean diagonal of A what
is needed changes little from step to step: it is kept, and corrected by the ratio found / allowed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

FLOOR = 0.03  # least damping, relative to the mean diagonal of A
TOLERANCE = 1.25  # of the degrees of freedom; beyond it the step is damped again at once
ATTEMPTS = 4
EARLY, EVERY = 16, 4  # the degrees of freedom are counted in the first steps, and then in every fourth


def damped(A: Tensor, samples: int, dof: float, state: dict[str, Any]) -> Tensor:
    """The Cholesky factor of A + d I with d at least 1; A is used up.

    `state` keeps "damping", what d is to be over the mean diagonal of A, and "damped", how often it was asked.
    """
    mean = float(A.diagonal().mean())
    relative, added = float(state.get("damping", FLOOR)), 0.0
    age = state.get("damped", 0)
    count = dof < 1 and (age < EARLY or age % EVERY == 0)
    if dof < 1:
        state["damped"] = age + 1
    for _ in range(ATTEMPTS):
        d = max(1.0, relative * mean, added)
        A.diagonal().add_(d - added)
        factor, added = _factorise(A, d)
        if not count:
            break
        used = (len(A) - added * float(_inverse(factor).square_().sum())) / samples
        if used > dof or relative * mean >= 1:
            relative = state["damping"] = max(FLOOR, added / mean * used / dof)
        if used <= TOLERANCE * dof:
            break
    return factor


def _factorise(A: Tensor, d: float) -> tuple[Tensor, float]:
    """The factor of A, to which d I has been added, and what it has become where that was not enough."""
    for _ in range(8):
        factor, failed = torch.linalg.cholesky_ex(A)
        if not failed:
            break
        A.diagonal().add_(99 * d)
        d *= 100
    return factor, d


def _inverse(factor: Tensor) -> Tensor:
    eye = torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
    return torch.linalg.solve_triangular(factor, eye, upper=False)
