"""The damping of the batch-coupled form: no step uses more degrees of freedom than it may."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ddpnopt import DDPNOpt
from ddpnopt.ddp.value.damping import ATTEMPTS, FLOOR, TOLERANCE, damped
from ddpnopt.errors import OptionError


def gram(samples: int, rank: int, scale: float, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    P = torch.randn(samples, rank, generator=generator, dtype=torch.float64)
    return scale * P @ P.T / rank


def used(A: Tensor, factor: Tensor) -> tuple[float, float]:
    """Degrees of freedom for each sample, from the eigenvalues, and the damping."""
    d = float((factor @ factor.T - A).diagonal().mean())
    e = torch.linalg.eigvalsh(A).clamp_min(0)
    return float((e / (e + d)).sum()) / len(A), d


@given(
    st.integers(1, 24), st.integers(1, 40), st.floats(-6, 8), st.floats(0.05, 0.95), st.integers(0, 5)
)  # fmt: skip
def test_degrees_of_freedom_settle_at_the_limit_or_the_learning_rate_rules(
    samples: int, rank: int, exponent: float, dof: float, seed: int
) -> None:
    A, state = gram(samples, rank, 10**exponent, seed), {}
    mean = float(A.diagonal().mean())
    for _ in range(12):  # steps on the same batch
        factor = damped(A[None].clone(), samples, dof, [state])[0]
    found, d = used(A, factor)
    assert found <= TOLERANCE * dof + 1e-6
    assert d >= max(1.0, FLOOR * mean) * (1 - 1e-6)
    if d > 1.01 * max(1.0, FLOOR * mean):
        assert found >= dof / TOLERANCE  # no more damping than is needed


def test_one_step_with_a_huge_learning_rate_is_within_bounds_at_once() -> None:
    A: Tensor = gram(32, 200, 1e8)
    found, _ = used(A, damped(A[None].clone(), 32, 0.25, [{}])[0])
    assert found <= 0.25 * TOLERANCE**ATTEMPTS


def test_without_a_limit_the_damping_is_that_of_the_learning_rate_and_nothing_is_kept() -> None:
    state: dict[str, Any] = {}
    A = gram(8, 20, 5.0)
    _, d = used(A, damped(A[None].clone(), 8, 1.0, [state])[0])
    assert d == pytest.approx(1.0)
    assert state == {}


def test_a_matrix_that_is_zero_or_indefinite_by_rounding_has_a_factor() -> None:
    zero, one = torch.zeros(1, 4, 4, dtype=torch.float64), torch.eye(4, dtype=torch.float64)
    assert torch.equal(damped(zero, 4, 0.25, [{}])[0], one)
    A = gram(6, 2, 1e3) - 50 * torch.eye(6, dtype=torch.float64)
    assert damped(A[None], 6, 0.25, [{}]).isfinite().all()


def train(model: nn.Module, steps: int, **options: Any) -> tuple[DDPNOpt, list[float]]:
    torch.manual_seed(3)
    opt, losses = DDPNOpt(model, **options), []
    for _ in range(steps):
        x, y = torch.randn(24, 6), torch.randint(3, (24,))  # labels of pure noise: nothing to learn
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        losses.append(float(loss.detach()))
        loss.backward()
        opt.step()
    return opt, losses


def test_on_pure_noise_fewer_degrees_of_freedom_do_less_harm() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3))
    limited = train(copy.deepcopy(model), 60, lr=1e4)[1]
    free = train(copy.deepcopy(model), 60, lr=1e4, dof=1.0)[1]
    assert sum(limited[-20:]) < sum(free[-20:])


def test_the_damping_is_saved_and_training_goes_on_bit_for_bit() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3))
    opt, _ = train(model, 10, lr=100.0)
    twin = copy.deepcopy(model)
    again = DDPNOpt(twin, lr=100.0)
    again.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert any("damping" in state for state in opt.state.values())
    x, y = torch.randn(24, 6), torch.randint(3, (24,))
    for m, o in ((model, opt), (twin, again)):
        for _ in range(5):
            o.zero_grad()
            F.cross_entropy(m(x), y).backward()
            o.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("dof", [0.0, -1.0, 1.5])
def test_a_limit_outside_of_its_range_is_named(dof: float) -> None:
    with pytest.raises(OptionError, match="dof"):
        DDPNOpt(nn.Linear(2, 2), dof=dof)
