"""Parameters without feedback: Adam whose length follows from the way travelled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ddpnopt import DDPNOpt
from ddpnopt.ddp.distance import START, Distance


def minimise(scale: float = 1.0, unit: float = 1.0, steps: int = 300) -> tuple[Tensor, Distance]:
    """A quadratic with its minimum 3 units away from the start; the loss is multiplied by `scale`."""
    torch.manual_seed(0)
    x = unit * torch.randn(20)
    target = x + 3 * unit * torch.randn(20).sign()
    distance, state = Distance(), dict[str, Any]()
    for _ in range(steps):
        distance.step([x], [scale * (x - target) / unit**2], [state], [1.0])
    return (x - target) / unit, distance


def test_a_minimum_far_away_is_reached_without_a_learning_rate() -> None:
    error, distance = minimise()
    assert error.abs().max() < 0.3
    assert distance.d > 20 * START


@given(st.floats(-6, 6))
def test_the_scale_of_the_loss_does_not_matter(power: float) -> None:
    torch.testing.assert_close(minimise(10**power, steps=30)[0], minimise(steps=30)[0], rtol=1e-5, atol=1e-6)


@given(st.floats(-1, 6))
def test_the_unit_of_the_parameters_does_not_matter(power: float) -> None:
    torch.testing.assert_close(minimise(unit=10**power, steps=30)[0], minimise(steps=30)[0], rtol=1e-5, atol=1e-6)


def test_the_bound_never_falls_and_stays_below_the_distance() -> None:
    bounds = [minimise(steps=n)[1].d for n in range(1, 60, 5)]
    assert bounds == sorted(bounds)
    assert bounds[-1] < 3.0


def test_entries_of_the_state_are_replaced_so_that_a_step_can_be_undone() -> None:
    x, state, distance = torch.ones(3), dict[str, Any](), Distance()
    distance.step([x], [torch.ones(3)], [state], [1.0])
    kept = {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}
    before = dict(state)
    distance.step([x], [torch.full((3,), 2.0)], [state], [1.0])
    for name, value in kept.items():
        assert torch.equal(before[name], value) if isinstance(value, Tensor) else before[name] == value


@pytest.mark.parametrize("factor", [0.0, 0.5])
def test_a_scheduler_shortens_the_step(factor: float) -> None:
    moved = []
    for each in (1.0, factor):
        x = torch.ones(3)
        Distance().step([x], [torch.ones(3)], [{}], [each])
        moved.append(float((1 - x).sum()))
    assert moved[1] == pytest.approx(factor * moved[0])


@pytest.mark.parametrize("start", [0.0, 2.0])
def test_a_parameter_changes_by_no_more_than_the_share_that_is_allowed(start: float) -> None:
    x, state, distance = torch.full((3,), start), dict[str, Any](), Distance()
    size = start or 3**-0.5  # one that starts at zero counts as one of a usual size
    for _ in range(30):
        before = x.clone()
        distance.step([x], [x - 100], [state], [1.0], share=0.01)
        assert float((x - before).abs().max()) <= 0.015 * max(
            size, float(before.abs().max())
        )  # late gradients weigh more
    assert float(x.min()) > start


class Policy(nn.Module):
    """Mean and deviation of an action; the deviation is the same for all states and has no feedback."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mean = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
        self.log_deviation = nn.Parameter(torch.tensor([-0.5]))

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.mean(state)[:, 0], self.log_deviation.exp()


@pytest.mark.filterwarnings("ignore::ddpnopt.OpenLoopWarning")
def test_the_deviation_of_a_policy_does_not_run_away() -> None:
    policy = Policy()
    opt = DDPNOpt(policy)
    for _ in range(150):
        state = torch.randn(64, 3)
        normal = torch.distributions.Normal(*policy(state))
        action = normal.sample()
        reward = torch.exp(-2 * (action - torch.tanh(state[:, 0])).square())
        opt.zero_grad()
        (-(reward - reward.mean()) * normal.log_prob(action)).mean().backward()
        opt.step()
        assert -8 < float(policy.log_deviation.detach()) < 2  # a loss without a minimum: the bound alone grows for ever


def test_a_parameter_that_starts_at_zero_keeps_its_usual_size_after_it_has_left() -> None:
    x, state, distance = torch.zeros(3), dict[str, Any](), Distance()
    for _ in range(100):
        distance.step([x], [x - 100], [state], [1.0], share=0.01)
    assert float(x.min()) > 0.2  # 0.05 if its size were its own from then on


def test_parameters_without_feedback_change_by_no_larger_a_share_than_the_layers_also_with_a_known_loss() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    opt = DDPNOpt(model, exclude=["2"])
    x, y = torch.randn(32, 6), torch.arange(32) % 3
    for step in range(10):
        before = [p.detach().clone() for p in model.parameters()]
        opt._distance.d = 1e3  # a bound that has grown without end
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
        shares = [float((p - old).norm() / old.norm()) for p, old in zip(model.parameters(), before, strict=True)]
        assert shares[2] < 3 * shares[0], step
