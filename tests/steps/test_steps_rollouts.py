"""The forward sweep runs where it shows something that the plan does not know."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from step_runs import losses_of
from torch import Tensor, nn

from ddpnopt import DDPNOpt
from ddpnopt.ddp.rollouts import BACK, LONGEST, REACTED, SETTLED, TRUSTED, Rollouts
from ddpnopt.ddp.step_length import SURPRISE
from ddpnopt.trace.replay import Playback


class Parallel(nn.Module):
    """A sum of layers: linear in all weights together."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 3) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x) for layer in self.layers]).sum(0)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def batches(count: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Three classes that overlap."""
    generator = torch.Generator().manual_seed(seed)
    centres = 0.7 * torch.randn(3, 8, generator=generator)
    labels = torch.randint(3, (count, 24), generator=generator)
    return [(centres[y] + torch.randn(24, 8, generator=generator), y) for y in labels]


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts second forward passes."""
    counted = [0]
    replay = Playback.replay

    def count(self: Playback, *args: Any) -> list[Tensor]:
        counted[0] += 1
        return replay(self, *args)

    monkeypatch.setattr(Playback, "replay", count)
    return counted


def test_the_plan_is_the_closed_loop_where_the_network_is_linear_along_the_step() -> None:
    torch.manual_seed(0)
    closed = Parallel().double()
    planned = copy.deepcopy(closed)
    x, y = torch.randn(12, 6).double(), torch.randn(12, 3).double()
    for model, closed_loop in ((closed, True), (planned, False)):
        opt = DDPNOpt(model, closed_loop=closed_loop)
        F.mse_loss(model(x), y).backward()
        opt.step()
    for a, b in zip(closed.parameters(), planned.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_most_steps_of_a_smooth_training_have_no_second_forward_pass_and_end_as_low(replays: list[int]) -> None:
    torch.manual_seed(0)
    model = network()
    twin, data = copy.deepcopy(model), batches(100)
    planned = losses_of(model, data)
    assert replays[0] < 50
    closed = losses_of(twin, data, DDPNOpt(twin, closed_loop=True))
    assert sum(planned[-20:]) <= 1.1 * sum(closed[-20:])


@pytest.mark.parametrize("options", [{"closed_loop": True}, {"diagnostics": True}, {"lr": 3.0}])
def test_every_step_has_a_second_forward_pass_where_the_options_ask_for_it(
    options: dict[str, Any], replays: list[int]
) -> None:
    torch.manual_seed(0)
    model = network()
    opt = DDPNOpt(model, **options)
    losses_of(model, batches(30), opt)
    assert replays[0] >= 30


def test_the_first_step_and_those_before_the_curvature_is_known_are_rolled_out(replays: list[int]) -> None:
    torch.manual_seed(0)
    model = network()
    losses_of(model, batches(4))
    assert replays[0] >= 3


def confirmed(rollouts: Rollouts, times: int) -> list[int]:
    """Steps that follow the plan before each of so many roll-outs, all of which confirm it."""
    between = []
    for _ in range(times):
        planned = 0
        while not rollouts.is_due:
            rollouts.follow(1.0)
            planned += 1
        between.append(planned)
        rollouts.observe(1.0, 0.0, 0.0, 1.0)
    return between


def test_roll_outs_become_rarer_while_they_confirm_the_plan() -> None:
    # the first one has nothing to be compared with; every now and then there is one step less
    assert confirmed(Rollouts(LONGEST), 7) == [0, 0, 1, 3, 7, 14, 15]


@pytest.mark.parametrize(
    "found", [(2 * REACTED, 0.0, 1.0), (0.0, 2 * TRUSTED, 1.0), (0.0, 0.0, 2 * SETTLED), (0.0, 0.0, 0.5 / SETTLED)]
)
def test_a_roll_out_that_does_not_confirm_the_plan_divides_the_interval(found: tuple[float, float, float]) -> None:
    rollouts = Rollouts(LONGEST)
    confirmed(rollouts, 7)
    rollouts.observe(1.0, *found)
    assert rollouts.interval == LONGEST // BACK


def test_a_step_that_has_not_lowered_the_loss_brings_all_roll_outs_back() -> None:
    rollouts = Rollouts(LONGEST)
    confirmed(rollouts, 7)
    rollouts.observe(1.0, 0.0, 1.0, 1.0)
    assert rollouts.is_due


def test_a_loss_lower_than_predicted_confirms_the_plan() -> None:
    rollouts = Rollouts(LONGEST)
    confirmed(rollouts, 7)
    rollouts.observe(1.0, 0.0, -0.5, 1.0)
    assert rollouts.interval == LONGEST


def test_a_curvature_that_the_slopes_raise_between_two_roll_outs_does_not_count_as_a_change() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
    opt = DDPNOpt(model)
    for _ in range(100):
        x = torch.randn(16, 4)
        opt.zero_grad()
        mean, log = model(x).T
        (log + 0.5 * ((x[:, 0] - mean) / log.exp()) ** 2).mean().backward()  # of no known form
        opt.step()
    assert opt.report.loss == "unknown"
    assert opt.report.planned > 60


def test_after_a_step_longer_than_the_last_one_rolled_out_the_next_is_rolled_out() -> None:
    rollouts = Rollouts(LONGEST)
    for _ in range(3):
        rollouts.observe(0.1, 0.0, 0.0, 1.0)
    rollouts.follow(0.1)
    assert not rollouts.is_due
    rollouts.follow(0.11 * SETTLED)
    assert rollouts.is_due
    rollouts.observe(0.11 * SETTLED, 0.0, 0.0, 1.0)
    rollouts.follow(0.11 * SETTLED)
    assert not rollouts.is_due, "the length is a known one"


def after_a_planned_step() -> tuple[nn.Sequential, DDPNOpt, list[Tensor], list[tuple[Tensor, Tensor]]]:
    """A network whose last step was a planned one, its optimizer, the weights before that step, and further data."""
    torch.manual_seed(0)
    model = network()
    opt, data = DDPNOpt(model), batches(60)
    losses_of(model, data, opt)
    before: list[Tensor] = []
    while not before or opt._rollouts.planned == 0:
        before = [p.detach().clone() for p in model.parameters()]
        losses_of(model, data[:1], opt)
    return model, opt, before, data[1:]


def test_a_planned_step_after_which_the_loss_is_far_too_large_is_taken_back() -> None:
    model, opt, before, data = after_a_planned_step()
    change = 30 * torch.randn(3)
    with torch.no_grad():  # as if the step had led there
        model[-1].bias += change
        opt.state[model[-1].weight]["update"][1] -= change
    losses_of(model, data[:1], opt)
    for p, old in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(p.detach(), old, rtol=1e-4, atol=1e-5)
    assert opt._rollouts.is_due
    assert opt.report.undone == 1


def test_a_batch_whose_loss_was_as_large_before_the_step_does_not_take_it_back(replays: list[int]) -> None:
    model, opt, _, data = after_a_planned_step()
    twin, other, _, _ = after_a_planned_step()
    x, y = data[0]
    odd, passes = [(30 * x, (y + 1) % 3)], [replays[0]]
    losses_of(model, odd, opt)
    passes.append(replays[0])
    assert opt.report.undone == 0
    other._rollouts.doubt()  # the step that follows is one without a surprise
    other._length.seen = 0
    losses_of(twin, odd, other)
    passes.append(replays[0])
    assert passes[1] - passes[0] == passes[2] - passes[1] + 1, "one pass with the weights before the last step"
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("what", ["other labels", "weights set from outside"])
def test_a_planned_step_is_not_taken_back_for_a_loss_that_was_as_large_before_it(what: str) -> None:
    model, opt, _, data = after_a_planned_step()
    x, y = data[0]
    if what == "other labels":
        y = model(x).argmin(1)
    else:
        with torch.no_grad():
            model[-1].bias += 30 * torch.tensor([1.0, -1.0, 0.0])
    before = [p.detach().clone() for p in model.parameters()]
    expected, deviation = opt._length.expected, opt._length.deviation
    loss = losses_of(model, [(x, y)], opt)[0]
    assert loss - expected > SURPRISE * deviation + expected
    assert opt.report.undone == 0
    assert any(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))  # a step of its own


@pytest.mark.parametrize(("samples", "undone"), [(1, 0), (24, 1)], ids=["one sample", "the batch"])
def test_a_planned_step_is_taken_back_where_it_has_raised_the_loss_of_the_batch_and_not_that_of_one_sample(
    samples: int, undone: int
) -> None:
    """One sample can fare as badly by chance: a roll-out of the step on its own batch would have kept it."""
    torch.manual_seed(0)
    model = nn.Linear(9, 3)
    opt, data = DDPNOpt(model), [(torch.cat([x, torch.zeros(24, 1)], 1), y) for x, y in batches(60)]
    losses_of(model, data, opt)
    while opt._rollouts.planned == 0:
        losses_of(model, data[:1], opt)
    x, y = data[0]
    x = x.clone()
    x[:samples, 8] = 1.0
    change = torch.where(torch.arange(3) == y[0], -500.0, 500.0)
    with torch.no_grad():  # as if the step had led there
        model.weight[:, 8] += change
        opt.state[model.weight]["update"][0][:, 8] -= change
    losses_of(model, [(x, y)], opt)
    assert opt.report.undone == undone
    assert opt._rollouts.planned == 0, "the step of this batch is rolled out"


@pytest.mark.parametrize("period", [2, 3, 4, 5, 7, 8, 16])
def test_roll_outs_come_to_every_place_of_a_loop_with_a_period_and_equally_often(period: int) -> None:
    rollouts = Rollouts(LONGEST)
    places = [0] * period
    for step in range(2000 * period):
        if rollouts.is_due:
            places[step % period] += 1
            rollouts.observe(1.0, 0.0, 0.0, 1.0)
        else:
            rollouts.follow(1.0)
    assert min(places) > 0.9 * max(places)


def test_losses_that_stay_large_are_expected_soon() -> None:
    torch.manual_seed(0)
    model = network()
    opt = DDPNOpt(model)
    losses_of(model, batches(40), opt)
    length = opt._length
    surprises = sum(length.is_surprised(100.0) for _ in range(40))
    assert 0 < surprises < 20
