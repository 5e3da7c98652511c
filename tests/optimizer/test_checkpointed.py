"""Activation checkpointing is noticed, also by the versions of torch that cannot tell which hooks are active."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddpnopt.trace import checkpointing


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(("reentrant", "noticed"), [(False, [True, True]), (True, [False, False])])
def test_a_block_knows_whether_it_is_checkpointed_and_when_it_runs_again(
    old: bool, reentrant: bool, noticed: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    if old:
        monkeypatch.setattr(checkpointing, "_top_hooks", None)
    seen: list[bool] = []
    layer = nn.Linear(3, 3)

    def block(x: Tensor) -> Tensor:
        seen.append(checkpointing.checkpointed())
        return layer(x).tanh()

    x = torch.randn(4, 3, requires_grad=True)
    checkpoint(block, x, use_reentrant=reentrant).sum().backward()
    assert seen == noticed
    block(x)
    assert seen == [*noticed, False]
