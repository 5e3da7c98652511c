"""Gradients that are not those of the loss, and noise: neither is a curvature, and training does not stand still."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ddpnopt import DDPNOpt
from ddpnopt.ddp.step_length import OWN, SHRINK, Evidence, StepLength
from ddpnopt.ddp.value.reactions import Reactions

FOUND = Evidence(1.0, 1.8, 1.7, 1.5, 1.6)


def take(length: StepLength, kappa: float, amiss: float) -> float:
    """One step in a world with this curvature, in which a part of the first-order decrease never comes."""
    asked, shorter = length.choose(FOUND), 1.0

    def change() -> float:
        alpha = shorter * asked
        return -(1 - amiss) * alpha * FOUND.own + 0.5 * kappa * FOUND.own_curvature * alpha**2

    if length.is_to_be_tested(FOUND, asked, change()):
        shorter = SHRINK
    length.learn(FOUND, shorter * asked, shorter * asked, change())
    return asked


@pytest.mark.parametrize("amiss", [0.5, 0.9, 1.1])
def test_a_decrease_that_never_comes_is_not_taken_for_a_curvature(amiss: float) -> None:
    length = StepLength()
    fractions = [take(length, 1.0, amiss) for _ in range(300)]
    assert min(fractions[200:]) > 0.05
    assert length.amiss == pytest.approx(amiss, abs=0.2)


def test_a_curvature_that_grows_ten_thousandfold_shortens_steps_as_much() -> None:
    length = StepLength()
    for k in range(400):
        last = take(length, 10 ** min(4.0, k / 60), 0.0)
    assert length.kappa == pytest.approx(1e4, rel=0.05)
    assert last <= 1.1 * OWN * FOUND.own / (1e4 * FOUND.own_curvature)
    assert length.amiss < 0.05


def test_a_gradient_that_becomes_that_of_the_loss_is_trusted_again() -> None:
    length = StepLength()
    for _ in range(200):
        take(length, 1.0, 0.9)
    for _ in range(100):
        take(length, 1.0, 0.0)
    assert length.amiss < 0.05


def test_noise_of_the_slope_at_the_next_batch_is_not_a_curvature_that_grows_with_shorter_steps() -> None:
    length = StepLength()
    for k in range(400):
        take(length, 1.0, 0.0)
        before = length.decrease * FOUND.unseen / FOUND.own
        length.learn_from_slope(FOUND, -before + (0.5 if k % 2 else -0.5) * length.decrease)
    assert length.kappa < 2


@settings(max_examples=50)
@given(st.integers(0, 1000), st.floats(0, 3))
def test_a_reaction_larger_than_the_plan_is_none(seed: int, size: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    plan, apart = torch.randn(2, 8, generator=generator, dtype=torch.float64)
    apart *= size * plan.norm() / apart.norm()
    assume(abs(size - 1) > 1e-6)
    assert Reactions(plan).take(plan + apart).equal(plan + apart if size < 1 else plan)


class Coded(nn.Module):
    """The nearest of 16 codes, with a straight-through estimator, and how far they are."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 8))
        self.out = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 12))
        self.codes = nn.Embedding(16, 4)
        nn.init.uniform_(self.codes.weight, -1 / 16, 1 / 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.into(x).view(-1, 2, 4)
        code = self.codes(torch.cdist(z, self.codes.weight).argmin(-1))
        apart = F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(z, code.detach())
        return self.out((z + (code - z).detach()).flatten(1)), apart


def test_a_network_with_a_straight_through_estimator_is_trained() -> None:
    torch.manual_seed(0)
    model, centres = Coded(), torch.randn(9, 12)
    opt = DDPNOpt(model)
    errors = []
    for _ in range(400):
        x = centres[torch.randint(9, (64,))] + 0.1 * torch.randn(64, 12)
        opt.zero_grad()
        z, apart = model(x)
        error = F.mse_loss(z, x)
        (error + apart).backward()
        opt.step()
        errors.append(error.item())
    assert opt._length.fraction > 1e-3
    assert sum(errors[-20:]) < 0.1 * sum(errors[:20])
