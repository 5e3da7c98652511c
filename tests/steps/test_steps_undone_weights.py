"""Large layers have no copy of their weights during a step: adding the update gives them back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ddpnopt.ddp.stage import COPIED, Stage, change
from ddpnopt.linear.linear import Linear

WIDE = (160, 128)


def stage_of(weights: list[Tensor], size: float) -> Stage:
    stage = Stage("0", Linear(WIDE, True), torch.empty(0), weights, 1.0, [], [], weights=weights)
    stage.size = size
    return stage


def changed(share: float, dtype: torch.dtype = torch.float32) -> tuple[Stage, list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    assert WIDE[0] * WIDE[1] >= COPIED
    weights = [torch.randn(WIDE).to(dtype), torch.randn(WIDE[0]).to(dtype)]
    before, update = [w.clone() for w in weights], [share * torch.randn_like(w) for w in weights]
    stage = stage_of(weights, 1.0)
    change([stage], [update])
    return stage, before, weights


def test_a_small_change_of_a_large_layer_is_undone_without_a_copy():
    stage, before, weights = changed(0.1)
    assert not stage.kept
    assert all(not torch.equal(a, b) for a, b in zip(before, weights, strict=True))
    stage.restore()
    for old, new in zip(before, weights, strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=4e-7)


@pytest.mark.parametrize("share", [1e3, 1e30, float("nan"), float("inf")])
def test_a_large_change_is_undone_exactly(share: float):
    stage, before, weights = changed(share)
    assert stage.kept
    stage.restore()
    assert all(torch.equal(a, b) for a, b in zip(before, weights, strict=True))


def test_in_half_precision_the_update_is_what_rounding_leaves_of_it():
    stage, before, weights = changed(0.1, torch.bfloat16)
    assert stage.update is not None
    for old, new, part in zip(before, weights, stage.update, strict=True):
        assert torch.equal(old - new, part)
    stage.restore()
    assert all(torch.equal(a, b) for a, b in zip(before, weights, strict=True))
