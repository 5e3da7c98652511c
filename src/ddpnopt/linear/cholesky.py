"""Cholesky factors in the triangle that takes less time on a CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

UPPER = 128  # rows up to which LAPACK has the upper triangle sooner, by up to a third, and from which on the lower one


@dataclass(frozen=True, eq=False)
class Cholesky:
    """The factor of a positive definite matrix, or of several, (…, N, N)."""

    factor: Tensor
    upper: bool = False

    def solve(self, r: Tensor) -> Tensor:
        """A^-1 r, for one matrix."""
        return torch.cholesky_solve(r[:, None], self.factor, upper=self.upper)[:, 0]

    def inverse(self) -> Tensor:
        return torch.cholesky_inverse(self.factor, upper=self.upper)


def cholesky(A: Tensor) -> tuple[Cholesky, Tensor]:
    """The factor, and other than 0 for each matrix that has none."""
    upper = A.shape[-1] <= UPPER
    factor, failed = torch.linalg.cholesky_ex(A, upper=upper)
    return Cholesky(factor, upper), failed
