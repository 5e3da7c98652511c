"""How much the algebra on B x B matrices is damped: by the learning rate, and by the information in a batch.

A step solves (d I + A) y = r, A = L^1/2 S L^1/2, where d = 1 is what the learning rate asks for. Its effective degrees
of freedom are those of a ridge regression on the batch,

    tr A (A + d I)^-1  =  N - d |C^-1|^2,        C C' = A + d I,        N the size of A

With a large learning rate they approach B: every sample is fitted, including its noise, at the expense of those in
other batches. So d is raised until they are at most `dof` per sample. Relative to the mean diagonal of A the required d
changes little from step to step: it is stored, and corrected by the ratio found / allowed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

FLOOR = 0.03  # least damping, relative to the mean diagonal of A
TOLERANCE = 1.25  # of the degrees of freedom; above it the step is damped again at once
ATTEMPTS = 4
EARLY, EVERY = 16, 4  # the degrees of freedom are counted in the first steps, and then in every fourth


def damped(A: Tensor, samples: int, dof: float, states: list[dict[str, Any]]) -> Tensor:
    """The Cholesky factors of A + d I with d at least 1, for the stages t of A: (T, N, N), which is overwritten.

    The state of each keeps "damping", d over the mean diagonal of A, and "damped", the number of calls.
    """
    means = A.diagonal(dim1=1, dim2=2).mean(1).tolist()
    d = [max(1.0, state.get("damping", FLOOR) * mean) for state, mean in zip(states, means, strict=True)]
    A.diagonal(dim1=1, dim2=2).add_(A.new_tensor(d)[:, None])
    factors, failed = torch.linalg.cholesky_ex(A)
    if failed.any():
        for t in failed.nonzero()[:, 0].tolist():
            factors[t], d[t] = _factorise(A[t], d[t])
    if dof == 1:
        return factors
    counted = []
    for t, state in enumerate(states):
        age = state.get("damped", 0)
        state["damped"] = age + 1
        if age < EARLY or age % EVERY == 0:
            counted.append(t)
    if counted:
        some = factors if len(counted) == len(states) else factors[counted]
        found = zip(counted, _degrees(some, [d[t] for t in counted]), strict=True)
        for t, used in found:
            factors[t] = _limited(A[t], factors[t], d[t], means[t], used / samples, samples, dof, states[t])
    return factors


def _limited(
    A: Tensor, factor: Tensor, d: float, mean: float, used: float, samples: int, dof: float, state: dict[str, Any]
) -> Tensor:
    """The factor of A, to which d I has been added, and more, until the degrees of freedom are within their limit."""
    for attempt in range(ATTEMPTS):
        relative = state.get("damping", FLOOR)
        if used > dof or relative * mean >= 1:
            relative = state["damping"] = max(FLOOR, d / mean * used / dof)
        if used <= TOLERANCE * dof or attempt == ATTEMPTS - 1:
            break
        more = max(1.0, relative * mean, d)
        A.diagonal().add_(more - d)
        factor, d = _factorise(A, more)
        used = _degrees(factor[None], [d])[0] / samples
    return factor


def _factorise(A: Tensor, d: float) -> tuple[Tensor, float]:
    """The factor of A, to which d I has been added, and the d that was finally needed."""
    for _ in range(8):
        factor, failed = torch.linalg.cholesky_ex(A)
        if not failed:
            break
        A.diagonal().add_(99 * d)
        d *= 100
    return factor, d


def _degrees(factors: Tensor, d: list[float]) -> list[float]:
    """N - d |C^-1|^2 of each."""
    N = factors.shape[1]
    eye = torch.eye(N, dtype=factors.dtype, device=factors.device).expand_as(factors)
    norms = torch.linalg.solve_triangular(factors, eye, upper=False).square_().sum((1, 2)).tolist()
    return [N - d_t * norm for d_t, norm in zip(d, norms, strict=True)]
