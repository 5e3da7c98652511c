"""Models that return a scalar next to their outputs: an auxiliary loss, a divergence, a balance of experts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt import DDPNOpt

B = 16


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)


class Coded(nn.Module):
    """Reconstructs its inputs, and says how large its code is."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(6, 4), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        code = torch.tanh(self.into(x))
        return self.out(code), code.square().mean()


@pytest.mark.parametrize("factor", [0.25, -0.1])
def test_the_loss_at_the_outputs_is_recognised_beside_a_scalar(factor: float) -> None:
    model, x = Coded(), torch.randn(B, 6)
    opt = DDPNOpt(model)
    z, aside = model(x)
    (F.mse_loss(z, x) + factor * aside).backward()
    opt.step()
    assert opt.report.loss == "squared_error"


@pytest.mark.parametrize("factor", [0.25, -0.1])
def test_the_change_of_the_loss_includes_that_of_the_scalar(factor: float) -> None:
    model, x = Coded(), torch.randn(B, 6)
    opt = DDPNOpt(model, diagnostics=True)

    def loss() -> Tensor:
        z, aside = model(x)
        return F.mse_loss(z, x) + factor * aside

    before = loss()
    before.backward()
    opt.step()
    with torch.no_grad():
        change = float(loss() - before)
    assert opt.report.actual == pytest.approx(change, rel=1e-6)
    assert opt.report.predicted == pytest.approx(change, rel=0.1)
