"""Activation checkpointing: blocks that run again in the backward pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ddpnopt import DDPNOpt


class Net(nn.Module):
    def __init__(self, recompute: bool, convolution: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        first = nn.Conv1d(3, 4, 3, padding=1) if convolution else nn.Linear(6, 6)
        self.body = nn.Sequential(first, nn.Tanh(), nn.Linear(6, 5), nn.ReLU())
        self.head = nn.Linear(20 if convolution else 15, 4)
        self.recompute = recompute
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.body, x, use_reentrant=False) if self.recompute else self.body(x)
        out: Tensor = self.head(h.flatten(1))
        return out


@pytest.mark.parametrize("value", ["batch", "outer"])
@pytest.mark.parametrize("convolution", [False, True])
def test_a_checkpointed_block_that_reads_the_data_equals_a_plain_one(value: str, convolution: bool) -> None:
    models = Net(True, convolution), Net(False, convolution)
    x, y = torch.randn(8, 3, 6, dtype=torch.float64), torch.arange(8) % 4
    for model in models:
        opt = DDPNOpt(model, lr=0.5, value=value)
        for _ in range(2):
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-12)
