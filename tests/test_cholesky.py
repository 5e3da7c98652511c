"""Cholesky factors solve and invert as dense double precision does, whichever triangle they are in."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ddpnopt.linear.cholesky import UPPER, cholesky


def positive(*shape: int) -> Tensor:
    a = torch.randn(*shape, 2 * shape[-1])
    return a @ a.mT / shape[-1] + torch.eye(shape[-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 7, UPPER, UPPER + 1])
def test_a_factor_solves_and_inverts(n: int, dtype: torch.dtype) -> None:
    A, r = positive(n), torch.randn(n)
    factor, failed = cholesky(A.to(dtype))
    inverse = torch.linalg.inv(A.double()).to(dtype)
    assert not failed
    torch.testing.assert_close(factor.inverse(), inverse, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(factor.solve(r.to(dtype)), inverse @ r.to(dtype), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("n", [5, UPPER + 1])
def test_several_matrices_are_factorised_in_one_call_that_tells_which_have_no_factor(n: int) -> None:
    A = positive(3, n)
    A[1] = -A[1]
    factor, failed = cholesky(A)
    assert [bool(each) for each in failed] == [False, True, False]
    torch.testing.assert_close(factor.inverse()[::2], torch.linalg.inv(A[::2].double()).float(), rtol=1e-4, atol=1e-5)
