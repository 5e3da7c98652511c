"""Steps under autocast and activation checkpointing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from optimizer_networks import distance, fcn, vectors
from replay_networks import (
    loss_of,
    step,
)
from torch import Tensor, nn

from ddpnopt import DDPNOpt

pytestmark = pytest.mark.filterwarnings("ignore::ddpnopt.OpenLoopWarning")


@pytest.mark.parametrize("value", ["outer", "batch", "full"])
@pytest.mark.parametrize("curvature", ["identity", "adam", "kfac"])
def test_training_under_autocast_lowers_the_loss(value: str, curvature: str) -> None:
    torch.manual_seed(1)
    model = fcn().float()
    x, y = vectors(32)
    x = x.float()
    lr = {"identity": 0.5, "adam": 0.02, "kfac": 0.05}[curvature]
    opt = DDPNOpt(model, lr=lr, value=value, curvature=curvature)
    losses = []
    for _ in range(15):
        opt.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0]
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_a_checkpointed_block_equals_a_plain_one() -> None:
    from torch.utils.checkpoint import checkpoint

    class Block(nn.Module):
        def __init__(self, recompute: bool) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.a, self.b, self.recompute = nn.Linear(5, 6), nn.Sequential(nn.Tanh(), nn.Linear(6, 4)), recompute
            self.c = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            x = checkpoint(self.b, x, use_reentrant=False) if self.recompute else self.b(x)
            return self.c(torch.tanh(x))

    models = Block(True), Block(False)
    for model in models:
        opt = DDPNOpt(model, lr=0.5, value="outer")
        for _ in range(2):
            step(model, opt, loss_of(*vectors()))
    assert distance(*models) < 1e-12


@pytest.mark.parametrize("value", ["outer", "batch", "full"])
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_autocast_goes_through_norms_and_pooling_between_layers(precision: str, value: str) -> None:
    model = nn.Sequential(
        nn.Conv1d(1, 2, 2), nn.AvgPool1d(2), nn.Conv1d(2, 2, 1), nn.LayerNorm((2, 2), elementwise_affine=False),
        nn.Flatten(), nn.Linear(4, 3),
    ).float()  # fmt: skip
    x, y = vectors(16)
    opt = DDPNOpt(model, lr=0.1, value=value)
    losses = []
    for _ in range(10):
        opt.zero_grad()
        with torch.autocast("cpu", getattr(torch, precision)):
            loss = F.cross_entropy(model(x[:, None].float()).float(), y)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
