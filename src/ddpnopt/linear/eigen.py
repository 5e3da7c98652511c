"""Eigendecompositions that hold: LAPACK's in single precision fails now and then where nothing is wrong."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, rising, and eigenvectors of finite symmetric matrices; in double precision where single fails.

    It fails with an error where eigenvalues are far apart, and without one on some matrices of low rank with many
    zeros, such as the second moments of spikes: then nothing in the result is a number.
    """
    try:
        values, vectors = torch.linalg.eigh(matrix, UPLO="U")  # the triangle that LAPACK reduces sooner
        if math.isfinite(float(values.sum())):
            return values, vectors
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        pass
    values, vectors = torch.linalg.eigh(matrix.double())
    return values.to(matrix.dtype), vectors.to(matrix.dtype)
