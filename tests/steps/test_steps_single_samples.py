"""Batches of one sample, whose loss is a guess: the noise of the next sample's slope does not count as curvature."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ddpnopt import DDPNOpt
from ddpnopt.ddp.step_length import Evidence, StepLength


@pytest.mark.parametrize("name", ["l1_loss", "smooth_l1_loss"])
def test_losses_of_unknown_form_train_with_one_sample_at_a_time(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(600, 4)
    y = torch.sin(x @ torch.randn(4, 1))
    model = nn.Sequential(nn.Linear(4, 24), nn.Tanh(), nn.Linear(24, 1))
    opt = DDPNOpt(model)
    for i in range(500):
        opt.zero_grad()
        getattr(F, name)(model(x[i : i + 1]), y[i : i + 1]).backward()
        opt.step()
    with torch.no_grad():
        error, chance = (model(x[500:]) - y[500:]).abs().mean(), (y[500:] - y.mean()).abs().mean()
    assert error < 0.5 * chance
    assert opt._length.kappa < 100


def test_the_slope_at_one_other_sample_is_no_curvature() -> None:
    length = StepLength(own=1.0, taken=0.01, decrease=0.01)
    length.learn_from_slope(Evidence(1.0, 1.0, 1.0, 0.0, 0.0), 0.01)
    assert length.kappa == 1.0
    length.unseen_curvature = 0.5
    length.learn_from_slope(Evidence(1.0, 1.0, 1.0, 0.0, 0.5), 0.01)
    assert length.kappa > 10
