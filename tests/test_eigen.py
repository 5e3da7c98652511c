"""Eigendecompositions hold where LAPACK's in single precision does not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ddpnopt.linear.eigen import eigh


def moments_of_spikes(seed: int) -> Tensor:
    """Second moments of 64 features of which few are ever other than zero."""
    generator = torch.Generator().manual_seed(seed)
    spikes = (torch.rand(256, 64, generator=generator) < 0.002).float()
    return spikes.T @ spikes * 0.6232


@pytest.mark.parametrize("seed", range(5))
def test_sparse_matrices_of_low_rank_are_decomposed(seed: int) -> None:
    matrix = moments_of_spikes(seed)
    values, vectors = eigh(matrix)
    assert torch.allclose((vectors * values) @ vectors.T, matrix, atol=1e-5)


@pytest.mark.parametrize("fails", ["with an error", "without one"])
def test_what_fails_in_single_precision_is_decomposed_in_double(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch.linalg.eigh

    def failing(matrix: Tensor, **options: str) -> tuple[Tensor, Tensor]:
        if matrix.dtype == torch.float64:
            return right(matrix, **options)
        if fails == "with an error":
            raise torch.linalg.LinAlgError("The algorithm failed to converge")
        values, vectors = right(matrix, **options)
        return values * torch.nan, vectors * torch.nan

    monkeypatch.setattr(torch.linalg, "eigh", failing)
    matrix = torch.randn(6, 9).to(torch.float32)
    matrix = matrix @ matrix.T
    values, vectors = eigh(matrix)
    assert values.dtype == torch.float32
    assert torch.allclose((vectors * values) @ vectors.T, matrix, atol=1e-4)
