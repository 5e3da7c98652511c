"""How the length of a step is chosen and remembered."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from step_runs import apart, classes, relu_network, trained, weights
from torch import nn

from ddpnopt import DDPNOpt
from ddpnopt.ddp.loss import UnknownLoss, as_flat
from ddpnopt.ddp.step_length import (
    EVIDENCE,
    GROWTH,
    LEAST_KAPPA,
    MEMORY,
    OWN,
    PATIENCE,
    SHRINK,
    START,
    Evidence,
    StepLength,
)

positive = st.floats(1e-3, 2.0)
evidences = st.builds(
    Evidence, loss=st.floats(1e-9, 1e9), own=positive, own_curvature=positive, unseen=st.floats(-1.0, 2.0),
    unseen_curvature=positive,
)  # fmt: skip
HELPFUL = Evidence(1.0, 1.8, 1.7, 1.5, 1.6)


def take(length: StepLength, found: Evidence, kappa: float = 1.0) -> float:
    """One step in a world where the true second-order term is kappa times that of the model."""
    asked = length.choose(found)
    length.learn(found, asked, asked, -asked * found.own + 0.5 * kappa * found.own_curvature * asked**2)
    return asked


@given(evidences)
def test_the_first_step_asks_for_one_percent_of_the_loss(found: Evidence) -> None:
    assert StepLength().choose(found) * found.own == pytest.approx(START)
    assert START == 0.01


@given(st.lists(evidences, min_size=2, max_size=12), st.lists(st.floats(0.01, 1e4), min_size=12, max_size=12))
def test_a_fraction_at_most_doubles_and_keeps_a_quarter(found: list[Evidence], kappas: list[float]) -> None:
    length = StepLength()
    fractions = [take(length, each, kappa) for each, kappa in zip(found, kappas, strict=False)]
    for last, new in pairwise(fractions):
        assert SHRINK * last * (1 - 1e-12) <= new <= GROWTH * last * (1 + 1e-12)


def test_a_fraction_doubles_while_the_model_is_right_up_to_what_serves_unseen_samples() -> None:
    length = StepLength()
    fractions = [take(length, HELPFUL) for _ in range(200)]
    assert fractions[1] == pytest.approx(2 * fractions[0])
    assert fractions[3] == pytest.approx(8 * fractions[0])
    assert fractions[-1] == pytest.approx(PATIENCE * HELPFUL.unseen / HELPFUL.unseen_curvature, rel=0.02)


def test_a_fraction_does_not_fall_while_unseen_samples_gain_however_little() -> None:
    length = StepLength()
    for _ in range(20):
        take(length, HELPFUL)
    before = length.fraction
    for _ in range(200):
        new = take(length, Evidence(1.0, 1.8, 1.7, 0.1, 1.6))
    assert new == before


def test_a_fraction_falls_when_unseen_samples_lose_and_the_next_batch_does_too() -> None:
    length = StepLength()
    for _ in range(20):
        take(length, HELPFUL)
    before = length.fraction
    for _ in range(60):
        length.feel(0.5 * length.decrease)
        take(length, Evidence(1.0, 1.8, 1.7, -0.5, 1.6))
    assert length.fraction < 0.1 * before


def test_a_slope_is_judged_by_the_whole_loss_where_a_step_promises_more() -> None:
    length = StepLength(decrease=20.0)
    length.feel(0.3)  # of the loss
    assert length.slope / length.slope_weight == pytest.approx(0.3)
    length = StepLength(decrease=0.5)
    length.feel(0.3)
    assert length.slope / length.slope_weight == pytest.approx(0.6)


def test_a_fraction_follows_the_curvature_at_once() -> None:
    length = StepLength()
    for _ in range(12):
        take(length, HELPFUL)
    before = length.fraction
    take(length, HELPFUL, kappa=1000.0)
    after = take(length, HELPFUL, kappa=1000.0)
    assert after == pytest.approx(SHRINK * before, rel=1e-6)  # much more than 1/t
    for _ in range(40):
        after = take(length, HELPFUL, kappa=1000.0)
    assert 200 < length.kappa <= 1000  # long steps weigh more in the running mean, and those came first
    assert after <= OWN * HELPFUL.own / (length.kappa * HELPFUL.own_curvature) * 1.05


def test_kappa_is_remembered_after_a_step_that_went_too_far_and_halves_at_most() -> None:
    length = StepLength()
    for _ in range(5):
        take(length, HELPFUL)
    take(length, HELPFUL, kappa=5000.0)
    high = length.kappa
    assert high > 100
    for _ in range(4):
        last = length.kappa
        take(length, HELPFUL)
        assert length.kappa >= last / GROWTH
    for _ in range(300):
        take(length, HELPFUL, kappa=0.0)
    assert length.kappa == LEAST_KAPPA


def test_the_slope_after_a_step_raises_kappa_where_the_loss_is_not_known() -> None:
    length = StepLength()
    for _ in range(3):
        asked = length.choose(HELPFUL)
        length.learn(HELPFUL, asked, asked, None)
    calm = length.kappa
    length.learn_from_slope(HELPFUL, 50 * length.decrease)  # uphill, steeper than it went down
    assert length.kappa > 10 * calm


@given(evidences, st.floats(0.0, 100.0))
def test_memory_is_the_part_of_the_slope_that_a_step_leaves(found: Evidence, kappa: float) -> None:
    length = StepLength()
    take(length, found)
    asked = take(length, found, kappa)
    left = 1 - asked * length.kappa * found.own_curvature / found.own
    assert length.memory * asked == pytest.approx(MEMORY * min(max(left, 0.0), 1.0), abs=1e-12)


@given(st.lists(evidences, min_size=1, max_size=8), st.floats(-3, 3))
def test_a_length_made_from_its_state_goes_on_the_same(found: list[Evidence], slope: float) -> None:
    length = StepLength()
    for each in found:
        take(length, each)
        length.feel(slope)
    copy = StepLength(**length.state())  # type: ignore[arg-type]
    assert copy == length
    assert [take(copy, each) for each in found] == [take(length, each) for each in found]


def test_a_scheduler_shortens_each_step_by_its_factor_and_not_the_memory() -> None:
    for factor in (1.0, 0.1):
        model = relu_network()
        opt = DDPNOpt(model)
        x, y = classes(samples=16)[0]
        for group in opt.param_groups:
            group["lr"] = factor
        fractions = []
        for _ in range(6):
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
            fractions.append(opt._length.fraction)
            assert opt._length.taken == pytest.approx(factor * opt._length.fraction)
        assert fractions[-1] > 0.5 * fractions[0]  # with the factor in the memory it would fall by it at each step


def test_training_starts_after_steps_with_a_factor_of_zero() -> None:
    model = relu_network()
    opt = DDPNOpt(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda t: 0.0 if t < 3 else min(1.0, t / 10))
    before = weights(model)
    x = classes(samples=16)[0][0]
    y = (x[:, 0] > 0).long()
    losses = []
    for step in range(40):
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        schedule.step()
        losses.append(loss.item())
        if step == 2:
            assert torch.equal(weights(model), before)
    assert losses[-1] < 0.2 * losses[0]


def test_a_step_whose_attempts_all_fail_shortens_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = relu_network()
    opt = DDPNOpt(model)
    (x, y), *_ = classes()
    before = weights(model)
    with monkeypatch.context() as patch:
        patch.setattr("ddpnopt._step_length.TOLERATED", -math.inf)
        F.cross_entropy(model(x), y).backward()
        opt.step()
    first = START / (opt._length.own / (1 - EVIDENCE))  # the running mean after one step
    assert opt.report.undone == 1
    assert torch.equal(weights(model), before)
    assert opt._length.fraction == pytest.approx(first / 64)
    opt.zero_grad()
    F.cross_entropy(model(x), y).backward()
    opt.step()
    assert opt._length.fraction <= 2 * first / 64
    assert not torch.equal(weights(model), before)


def test_a_loss_that_was_below_zero_has_no_level_in_any_later_batch() -> None:
    length = StepLength()
    assert length.level(0.3) == 0.3
    assert length.level(None) is None
    assert length.level(-0.1) == 0.0
    assert length.level(0.3) == 0.0


@pytest.mark.parametrize("factor", [1.0, 1e3])
def test_losses_without_a_level_ask_in_proportion_to_their_gradients(factor: float) -> None:
    """The same outputs with gradients a tenth as large: a hundredth of the level, so a tenth of the way."""
    z, q = torch.randn(8, 3), factor * torch.randn(8, 3)
    first, flatness = as_flat([(z, UnknownLoss.adding_up_to(factor, z, q))], 0.0)
    second, same = as_flat([(z, UnknownLoss.adding_up_to(factor, z, 0.1 * q))], flatness)
    levels = [float(found[0][1].per_sample(z).sum()) for found in (first, second)]
    assert levels[0] == pytest.approx(factor)
    assert levels[1] == pytest.approx(0.01 * factor)
    assert same == flatness


def test_a_memory_that_does_not_fit_the_batch_is_dropped() -> None:
    model = relu_network()
    opt = DDPNOpt(model)
    (x, y), *_ = classes()
    for _ in range(2):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for update in [state["update"] for state in opt.state.values() if "update" in state]:
            for part in update:
                part.mul_(1e3)
        opt.step()
    assert opt._length.own_curvature < 4


def test_a_loss_far_above_those_before_is_a_surprise_and_noise_is_none() -> None:
    torch.manual_seed(0)
    length = StepLength()
    for loss in (1 + 0.3 * torch.randn(200)).tolist():
        assert not length.is_surprised(loss)
    assert not length.is_surprised(None)
    assert length.is_surprised(84.0)
    assert length.is_surprised(math.nan)
    assert not length.is_surprised(1.2)


def test_a_step_that_sends_a_loss_of_unknown_form_up_is_taken_back_and_a_loss_that_jumps_by_itself_is_not() -> None:
    """A loss computed outside of the model, from outputs that are guessed to be those of a square."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    opt = DDPNOpt(model)

    def step(more: float = 0.0) -> None:
        opt.zero_grad()
        z = model(torch.randn(16, 4))
        (more + (z - 1).abs().pow(1.5).mean()).backward()
        opt.step()

    for _ in range(12):
        step()
    step(1e6)  # whose gradient says that the last step has next to nothing to do with it
    assert opt.report.undone == 0
    for _ in range(30):
        step()
    before = weights(model)
    step()
    moved = weights(model)
    with torch.no_grad():
        for p in model.parameters():
            for part in opt.state[p].get("update", []):
                like = next(q for q in model.parameters() if q.shape == part.shape)
                like.sub_(part, alpha=1e4)  # as if the last step had gone wrong
                part.mul_(1 + 1e4)
    step()
    assert apart(weights(model), before) < 1e-2 * apart(moved, before)
    assert apart(moved, before) > 1e-6
    assert opt.report.undone == 1
    step()
    assert opt._length.fraction > 0


@pytest.mark.parametrize("constant", [0.0, 100.0])
def test_a_squared_error_less_a_constant_trains_although_its_level_is_unknown(constant: float) -> None:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    x = torch.randn(96, 8)
    y = torch.sin(x @ torch.randn(8, 1)) + 0.3 * x[:, :1] * x[:, 1:2]
    batches = list(zip(x.split(16), y.split(16), strict=True)) * 15
    model = trained(model, batches, lambda z, y: F.mse_loss(z, y) - constant)
    assert F.mse_loss(model(x), y).item() < 0.05  # 0.6 at the start
