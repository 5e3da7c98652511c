"""Of a step that changes a layer too much a part is kept, where that part is a shorter step: it is not made again."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from step_runs import losses_of
from torch import Tensor, nn

from ddpnopt import DDPNOpt, NonFiniteError
from ddpnopt._step import Step
from ddpnopt.ddp.rollouts import LONGEST
from ddpnopt.ddp.step_length import REACH, StepLength

FAR = 50.0  # times the length of the last step


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 200), nn.Tanh(), nn.Linear(200, 160), nn.Tanh(), nn.Linear(160, 3))


def pictures() -> nn.Module:
    layers = nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 6, 2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(54, 3)
    return nn.Sequential(*layers)


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 24, 8, generator=generator)
    return [(each, (each[:, :3] + 0.5 * each[:, 3:6]).argmax(1)) for each in x]


def trained(make: Callable[[], nn.Module], *, planned: bool, **options: float) -> tuple[nn.Module, DDPNOpt]:
    """A model and its optimizer, whose next step is a planned one, or one that is rolled out."""
    torch.manual_seed(0)
    model = make().double()
    opt = DDPNOpt(model, **options)
    losses_of(model, [(x.double(), y) for x, y in batches(30)], opt)
    opt._rollouts.interval, opt._rollouts.planned = (LONGEST, 0) if planned else (1, 0)
    opt._length.tested, opt._length.wait = opt._length.steps, torch.inf  # no other reason to make it again
    opt._length.doubted = torch.inf
    return model, opt


def step_of_length(fraction: float, model: nn.Module, opt: DDPNOpt, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = batches(31)[-1]
    with monkeypatch.context() as patch:
        patch.setattr(StepLength, "choose", lambda *_, **__: fraction)
        opt.zero_grad()
        F.cross_entropy(model(x.double()), y).backward()
        opt.step()


def largest_share(model: nn.Module, before: nn.Module) -> float:
    """By which a step has changed a layer, relative to the limit's measure of it."""
    shares = []
    for new, old in zip(model.modules(), before.modules(), strict=True):
        if isinstance(new, (nn.Linear, nn.Conv2d)):
            m, n = old.weight.flatten(1).shape
            start = (3 * n) ** -0.5  # a layer counts as no smaller than it was
            size = max(start, float(old.weight.detach().square().mean().sqrt())) * (m**0.5 + n**0.5)
            change = (new.weight - old.weight).detach().flatten(1)
            shares.append(float(torch.linalg.matrix_norm(change, 2)) / size)
    return max(shares)


@pytest.mark.parametrize("decay", [0.0, 1e-2])
@pytest.mark.parametrize("make", [small, wide, pictures])
def test_a_planned_step_that_goes_too_far_is_the_one_that_asks_for_the_part_within_the_limit(
    make: Callable[[], nn.Module], decay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, opt = trained(make, planned=True, weight_decay=decay)
    twin, other = trained(make, planned=True, weight_decay=decay)
    before, counted = copy.deepcopy(model), opt.report.shortened
    step_of_length(FAR * opt._length.fraction, model, opt, monkeypatch)
    assert opt.report.fraction is not None
    assert opt.report.fraction < FAR * other._length.fraction / 2
    step_of_length(opt.report.fraction, twin, other, monkeypatch)
    assert opt.report.shortened == counted
    assert largest_share(model, before) == pytest.approx(REACH, rel=0.2)
    torch.testing.assert_close(model.state_dict(), twin.state_dict())
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        mine, its = opt.state[p], other.state[q]
        assert mine.keys() == its.keys()
        torch.testing.assert_close(mine.get("update"), its.get("update"))
        torch.testing.assert_close(mine.get("promised"), its.get("promised"))
    for name in ("fraction", "taken", "decrease", "reach"):
        assert getattr(opt._length, name) == pytest.approx(getattr(other._length, name))


def test_the_loss_after_the_part_of_a_plan_is_looked_at_and_one_that_has_raised_it_is_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, opt = trained(small, planned=True)
    rolled_out, again = opt._rollouts.count, opt.report.shortened
    step_of_length(FAR * opt._length.fraction, model, opt, monkeypatch)
    assert opt._rollouts.count == rolled_out + 1
    assert opt.report.shortened == again
    opt._rollouts.interval, before = LONGEST, copy.deepcopy(model)
    first = opt.report.fraction
    assert first is not None
    with monkeypatch.context() as patch:
        patch.setattr("ddpnopt._step_length._loss_after_part", lambda step: 1.1 * step.loss_before)
        step_of_length(FAR * first, model, opt, monkeypatch)
    assert opt.report.shortened == again + 1
    assert 0 < largest_share(model, before) < 1.5 * REACH


@pytest.mark.parametrize(("trusted", "again"), [(torch.inf, 0), (0.0, 1)], ids=["little", "much"])
def test_a_step_that_is_rolled_out_and_goes_too_far_is_made_again_only_if_layers_have_reacted_much(
    trusted: float, again: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, opt = trained(small, planned=False)
    before, counted = copy.deepcopy(model), opt.report.shortened
    monkeypatch.setattr("ddpnopt._step_length.REACTED", trusted)
    fraction = opt._length.fraction
    while largest_share(model, before) == 0:
        step_of_length(min(FAR * fraction, 3 * opt._length.reach), model, opt, monkeypatch)
    assert opt.report.shortened == counted + again
    assert largest_share(model, before) == pytest.approx(REACH, rel=0.2)


@pytest.mark.parametrize("far", [1e3, 1e12])
def test_a_part_of_a_step_far_larger_than_the_weights_leaves_these_what_they_are(
    far: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taking back most of a step of that size would leave rounding errors in the place of the weights."""
    torch.manual_seed(0)
    model = small()
    opt = DDPNOpt(model)
    losses_of(model, batches(30), opt)
    opt._rollouts.interval, opt._rollouts.planned = LONGEST, 0
    before, counted = copy.deepcopy(model), opt.report.shortened
    with monkeypatch.context() as patch:
        patch.setattr(StepLength, "choose", lambda *_, **__: far)
        losses_of(model, batches(1), opt)
    assert opt.report.shortened == counted
    assert largest_share(model, before) == pytest.approx(REACH, rel=0.2)


@pytest.mark.parametrize("make", [small, wide, pictures])
def test_a_step_that_fails_after_a_part_of_it_was_kept_leaves_nothing(
    make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, opt = trained(make, planned=True)
    kept = [state["update"] for state in opt.state.values() if "update" in state]
    before, updates = copy.deepcopy(model.state_dict()), copy.deepcopy(kept)

    def fail(_: Step) -> None:
        raise NonFiniteError("after the update")

    with monkeypatch.context() as patch:
        patch.setattr(Step, "finish", fail)
        with pytest.raises(NonFiniteError, match="after the update"):
            step_of_length(FAR * opt._length.fraction, model, opt, monkeypatch)
    torch.testing.assert_close(model.state_dict(), before)
    now = [state["update"] for state in opt.state.values() if "update" in state]
    torch.testing.assert_close(now, updates)


def test_the_part_of_a_step_in_half_precision_is_what_rounding_leaves_of_it() -> None:
    torch.manual_seed(0)
    model = small().bfloat16()
    opt = DDPNOpt(model)
    before = [p.detach().clone() for p in model.parameters()]
    for x, y in batches(12):
        before = [p.detach().clone() for p in model.parameters()]
        opt._length.fraction *= FAR
        opt.zero_grad()
        F.cross_entropy(model(x.bfloat16()).float(), y).backward()
        opt.step()
    updates = [part for state in opt.state.values() for part in state.get("update", [])]
    assert updates
    for old, p in zip(before, model.parameters(), strict=True):
        assert any(torch.equal(old - p.detach(), part) for part in updates if part.shape == p.shape)
