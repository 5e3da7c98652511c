"""The Gram matrix of an embedding's gradients, in the forms that few and many ids per sample ask for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpnopt.linear import lookup
from ddpnopt.linear.lookup import Lookup, RowsOfIds
from ddpnopt.linear.metric import IDENTITY, Metric


def dense(layer: Lookup, x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """The gradient of each sample, (B, ids * numbers)."""
    each = torch.zeros(len(x), *layer.weight_shape, dtype=p.dtype)
    for sample, ids, rows in zip(each, x, p, strict=True):
        for i, row in zip(ids.tolist(), rows, strict=True):
            if i != layer.padding_idx:
                sample[i] += row
    return each.flatten(1)


@pytest.mark.parametrize("gathered", [0, 10**9], ids=["meetings", "ids"])
@pytest.mark.parametrize("held", [8, lookup.HELD], ids=["in pieces", "at once"])
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000), ids=st.integers(1, 9), places=st.integers(0, 4), padding=st.booleans(),
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 6)),
)  # fmt: skip
def test_the_gram_matrix_is_that_of_the_explicit_gradients(
    gathered: int, held: int, seed: int, ids: int, places: int, padding: bool, sizes: tuple[int, int]
) -> None:
    random = torch.Generator().manual_seed(seed)
    layer = Lookup((ids, 3), padding_idx=0 if padding else None)
    both = []
    for samples in sizes:
        x = torch.randint(ids, (samples, places), generator=random)
        both.append((x, torch.randn(samples, places, 3, generator=random, dtype=torch.float64)))
    scale = torch.rand(ids, 1, generator=random, dtype=torch.float64) + 0.5
    (a, b), (A, B) = [RowsOfIds(layer, *each) for each in both], [dense(layer, *each) for each in both]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookup, "GATHERED", gathered)
        patch.setattr(lookup, "HELD", held)
        torch.testing.assert_close(a.gram(IDENTITY), A @ A.T)
        torch.testing.assert_close(a.gram(IDENTITY, b), A @ B.T)
        torch.testing.assert_close(a.gram(Metric(D=[scale])), A * scale.expand(-1, 3).flatten() @ A.T)
