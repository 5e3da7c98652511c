"""The optimizer in the user's loop: closures, zero_grad, schedulers, parameter groups, frozen layers, other passes."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from optimizer_networks import batches, cnn, distance, fcn, images, same, train, twins, vectors, weights
from torch import Tensor, nn

from ddpnopt import DDPNOpt
from ddpnopt.trace.recording import Recording

VALUES = pytest.mark.parametrize("value", ["outer", "batch", "full"])
Schedule = torch.optim.lr_scheduler


# -- closures and zero_grad --------------------------------------------------------------------------------------------


@VALUES
@pytest.mark.parametrize("feedback", [True, False])
def test_a_closure_is_called_once_its_loss_returned_and_the_weights_are_the_same(value: str, feedback: bool) -> None:
    a, b = twins(fcn())
    options: dict[str, Any] = {"lr": 0.3, "value": value, "feedback": feedback, "momentum": 0.5}
    train(a, DDPNOpt(a, **options), vectors, 3)
    opt = DDPNOpt(b, **options)
    calls = []
    for x, y in batches(vectors, 3):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            opt.zero_grad()
            loss = F.cross_entropy(b(x), y)
            loss.backward()
            calls.append(loss)
            return loss

        returned = opt.step(closure)
        assert returned is calls[-1]
    assert len(calls) == 3
    assert same(a, b)


def test_the_plain_step_returns_nothing() -> None:
    model = fcn()
    opt = DDPNOpt(model, lr=0.1, value="outer")
    F.cross_entropy(model(vectors()[0]), vectors()[1]).backward()
    assert opt.step() is None


@VALUES
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_may_stand_before_between_or_after(value: str, set_to_none: bool) -> None:
    results = []
    torch.manual_seed(0)
    start = fcn()
    for place in ("before", "between", "after", "everywhere"):
        model = copy.deepcopy(start)
        opt = DDPNOpt(model, lr=0.3, value=value, momentum=0.9)
        for x, y in batches(vectors, 3):
            if place in ("before", "everywhere"):
                opt.zero_grad(set_to_none)
            loss = F.cross_entropy(model(x), y)
            if place in ("between", "everywhere"):
                opt.zero_grad(set_to_none)
            loss.backward()
            opt.step()
            if place in ("after", "everywhere"):
                opt.zero_grad(set_to_none)
        results.append(weights(model))
    assert all(same(results[0], other) for other in results[1:])


def test_zero_grad_of_the_model_serves_as_well() -> None:
    a, b = twins(fcn())
    train(a, DDPNOpt(a, lr=0.3, value="outer"), vectors, 3)
    opt = DDPNOpt(b, lr=0.3, value="outer")
    for x, y in batches(vectors, 3):
        b.zero_grad()
        F.cross_entropy(b(x), y).backward()
        opt.step()
    assert same(a, b)


def test_zero_grad_drops_a_backward_pass() -> None:
    a, b = twins(fcn())
    train(a, DDPNOpt(a, lr=0.3, value="outer"), vectors, 1)
    opt = DDPNOpt(b, lr=0.3, value="outer")
    x, y = vectors(seed=5)
    F.cross_entropy(b(x), y).backward()
    train(b, opt, vectors, 1)
    assert same(a, b)


def test_weight_gradients_are_left_out_unless_asked_for() -> None:
    model = fcn()
    x, y = vectors()
    expected = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    opt = DDPNOpt(model, lr=0.1, value="outer")
    F.cross_entropy(model(x), y).backward()
    left = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(left) <= 1  # in the first steps one zero, which tells whether gradients are clipped
    assert not any(bool(g.any()) for g in left)
    del opt
    opt = DDPNOpt(model, lr=0.1, weight_grads=True, value="outer")
    F.cross_entropy(model(x), y).backward()
    grads = [p.grad for p in model.parameters()]
    assert all(map(torch.equal, grads, expected))
    opt.step()
    assert all(map(torch.equal, (p.grad for p in model.parameters()), expected))  # .grad is not ours to rewrite


@VALUES
def test_with_or_without_weight_gradients_the_steps_are_the_same(value: str) -> None:
    a, b = twins(fcn())
    train(a, DDPNOpt(a, lr=0.3, value=value), vectors, 3)
    train(b, DDPNOpt(b, lr=0.3, value=value, weight_grads=True), vectors, 3)
    assert same(a, b)


@VALUES
@pytest.mark.parametrize("weight_grads", [True, False])
def test_a_penalty_on_the_weights_in_the_loss_equals_weight_decay(value: str, weight_grads: bool) -> None:
    a, b = twins(fcn())
    train(a, DDPNOpt(a, lr=0.3, value=value, weight_decay=0.1), vectors, 2)
    opt = DDPNOpt(b, lr=0.3, value=value, weight_grads=weight_grads)
    for x, y in batches(vectors, 2):
        opt.zero_grad()
        penalty = sum(p.square().sum() for p in b.parameters())
        (F.cross_entropy(b(x), y) + 0.05 * penalty).backward()
        opt.step()
    assert distance(a, b) < 1e-12


# -- schedulers --------------------------------------------------------------------------------------------------------


SCHEDULES: dict[str, Callable[[DDPNOpt], Any]] = {
    "StepLR": lambda opt: Schedule.StepLR(opt, 2, 0.5),
    "CosineAnnealingLR": lambda opt: Schedule.CosineAnnealingLR(opt, 5),
    "OneCycleLR": lambda opt: Schedule.OneCycleLR(opt, 0.5, total_steps=8),
    "ReduceLROnPlateau": lambda opt: Schedule.ReduceLROnPlateau(opt, patience=0, factor=0.5),
    "LinearLR": lambda opt: Schedule.LinearLR(opt, 0.1, total_iters=4),
}


@VALUES
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_scheduler_sets_the_learning_rate_of_each_step(name: str, value: str) -> None:
    a, b = twins(fcn())
    opt = DDPNOpt(a, lr=0.3, value=value, momentum=0.9)
    schedule = SCHEDULES[name](opt)
    by_hand = DDPNOpt(b, lr=9.0, value=value, momentum=0.1)
    used = []
    for step in range(6):
        used.append((opt.param_groups[0]["lr"], opt.param_groups[0]["momentum"]))
        by_hand.param_groups[0]["lr"], by_hand.param_groups[0]["momentum"] = used[-1]
        train(a, opt, vectors, 1)
        train(b, by_hand, vectors, 1)
        if name == "ReduceLROnPlateau":
            schedule.step(float(step))  # a metric that never improves
        else:
            schedule.step()
    assert same(a, b)
    assert len({lr for lr, _ in used}) > 2
    assert (len({m for _, m in used}) > 2) == (name == "OneCycleLR")


def test_the_learning_rate_of_the_group_is_the_one_that_counts() -> None:
    model = fcn()
    before = weights(model)
    opt = DDPNOpt(model, lr=0.3, value="outer")
    opt.param_groups[0]["lr"] = 0.0
    train(model, opt, vectors, 2)
    assert same(before, model)


def test_one_cycle_of_momentum_is_refused_beside_adam() -> None:
    model = fcn()
    opt = DDPNOpt(model, lr=0.01, curvature="adam", value="outer")

    def cycle() -> None:
        Schedule.OneCycleLR(opt, 0.02, total_steps=5)
        train(model, opt, vectors, 1)

    with pytest.raises(ValueError, match="momentum"):  # by torch, or by the next step
        cycle()


# -- parameter groups --------------------------------------------------------------------------------------------------


@VALUES
def test_groups_with_lr_zero_keep_their_layers_and_the_others_move(value: str) -> None:
    model = fcn()
    before = weights(model)
    ends = [*model[0].parameters(), *model[4].parameters()]
    opt = DDPNOpt(model, 0.3, value=value, params=[{"params": ends}, {"params": model[2].parameters(), "lr": 0.0}])
    train(model, opt, vectors, 2)
    moved = [not torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True)]
    assert moved == [True, True, False, False, True, True]


@VALUES
def test_weight_decay_of_a_group_acts_on_its_own_layers(value: str) -> None:
    """In open loop the last layer's step is that of SGD: its decay shows there and nowhere else."""
    start = fcn()
    a, b = copy.deepcopy(start), copy.deepcopy(start)

    def rest(net: nn.Module) -> list[nn.Parameter]:
        return [*net[0].parameters(), *net[2].parameters()]

    options: dict[str, Any] = {"lr": 0.3, "value": value, "closed_loop": False}
    train(a, DDPNOpt(a, params=[{"params": rest(a)}, {"params": a[4].parameters()}], **options), vectors, 1)
    groups = [{"params": rest(b)}, {"params": [b[4].weight], "weight_decay": 0.5}, {"params": [b[4].bias]}]
    train(b, DDPNOpt(b, params=groups, **options), vectors, 1)
    (W, bias), (W_a, bias_a), (W_b, bias_b) = (weights(net[4]) for net in (start, a, b))
    if value != "batch":  # where all samples share one system, the weights of the samples in the last layer shift, too
        assert distance([W_a - 0.3 * 0.5 * W], [W_b]) < 1e-12
        assert distance([bias_a], [bias_b]) < 1e-12
    assert distance([W_a], [W_b]) > 1e-3
    assert distance([bias], [bias_b]) > 1e-3


def test_groups_with_the_same_settings_equal_one_group() -> None:
    a, b = twins(cnn())
    train(a, DDPNOpt(a, 0.1, momentum=0.9, weight_decay=1e-2, value="outer"), images, 3)
    groups = [{"params": [p], "lr": 0.1} for p in b.parameters()]
    train(b, DDPNOpt(b, 7.0, params=groups, momentum=0.9, weight_decay=1e-2, value="outer"), images, 3)
    assert same(a, b)


def test_without_feedback_groups_act_as_in_torch() -> None:
    a, b = twins(fcn())

    def groups(net: nn.Module) -> list[dict[str, Any]]:
        return [
            {"params": net[0].parameters(), "lr": 0.3, "weight_decay": 0.1},
            {"params": [*net[2].parameters(), *net[4].parameters()], "momentum": 0.9},
        ]

    train(a, DDPNOpt(a, 0.1, params=groups(a), feedback=False), vectors, 5)
    train(b, torch.optim.SGD(groups(b), 0.1), vectors, 5)
    assert distance(a, b) < 1e-13


def test_a_group_added_later_is_trained() -> None:
    model = fcn()
    opt = DDPNOpt(model, 0.1, params=model[0].parameters(), value="outer")
    before = weights(model)
    train(model, opt, vectors, 1)
    assert same(before[2:], weights(model)[2:])
    opt.add_param_group({"params": model[4].parameters()})
    with pytest.warns(match=r"4\.weight"):
        train(model, opt, vectors, 1)
    moved = [not torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True)]
    assert moved == [True, True, False, False, True, True]


# -- frozen layers -----------------------------------------------------------------------------------------------------


@VALUES
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("frozen", [["weight", "bias"], ["bias"], ["weight"]], ids=str)
@pytest.mark.filterwarnings("ignore::ddpnopt.OpenLoopWarning")
def test_frozen_parameters_stay_bit_for_bit_and_the_others_move(frozen: list[str], when: str, value: str) -> None:
    model = fcn()
    frozen = [f"2.{name}" for name in frozen]
    opt = None
    if when == "after":
        opt = DDPNOpt(model, 0.3, value=value, momentum=0.9, weight_decay=0.1)
        train(model, opt, vectors, 2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    if opt is None:
        opt = DDPNOpt(model, 0.3, value=value, momentum=0.9, weight_decay=0.1)
    train(model, opt, vectors, 3)
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) == (name in frozen)
        assert p.requires_grad == (name not in frozen)


@VALUES
def test_an_unfrozen_layer_moves_again(value: str) -> None:
    model = fcn()
    opt = DDPNOpt(model, 0.3, value=value)
    model[2].requires_grad_(False)
    train(model, opt, vectors, 1)
    before = weights(model[2])
    model[2].requires_grad_(True)
    train(model, opt, vectors, 1)
    assert not any(map(torch.equal, before, model[2].parameters()))


# -- other passes ------------------------------------------------------------------------------------------------------


def nothing(model: nn.Module) -> None:
    pass


def trained_with(model: nn.Module, extra: Callable[[nn.Module], None], place: str, value: str) -> list[Tensor]:
    model = copy.deepcopy(model)
    opt = DDPNOpt(model, lr=0.3, value=value, momentum=0.9)

    def at(here: str) -> None:
        if here == place:
            extra(model)

    for x, y in batches(vectors, 3):
        at("first")
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        at("before backward")
        loss.backward()
        at("before step")
        opt.step()
        at("last")
    return weights(model)


def validation(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        model(vectors(n=5, seed=9)[0])
    model.train()


def no_grad_in_training_mode(model: nn.Module) -> None:
    with torch.no_grad():
        model(vectors(n=5, seed=9)[0])


def inference(model: nn.Module) -> None:
    with torch.inference_mode():
        model(vectors(n=5, seed=9)[0])


def gradients_enabled(model: nn.Module) -> None:
    model(vectors(n=5, seed=9)[0])


@VALUES
@pytest.mark.parametrize("extra", [validation, no_grad_in_training_mode, inference, gradients_enabled])
@pytest.mark.parametrize("place", ["first", "before backward", "before step", "last"])
def test_another_pass_without_backward_changes_nothing(extra: Callable[..., None], place: str, value: str) -> None:
    model = fcn()
    assert same(trained_with(model, nothing, place, value), trained_with(model, extra, place, value))


@VALUES
def test_batches_of_different_size_follow_each_other(value: str) -> None:
    model = fcn()
    opt = DDPNOpt(model, lr=0.3, value=value)
    for n in (8, 3, 1, 8):
        before = weights(model)
        x, y = vectors(n)
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
        assert not any(map(torch.equal, before, model.parameters()))


@VALUES
def test_the_loss_falls_in_the_ordinary_loop(value: str) -> None:
    model = fcn()
    x, y = vectors(32)
    opt = DDPNOpt(model, lr=1.0, value=value)
    first = F.cross_entropy(model(x), y).item()
    for _ in range(40):
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
    assert loss.item() < 0.8 * first


def test_the_share_asked_for_falls_with_the_root_of_the_samples_seen() -> None:
    found = []
    for options, samples in (({"relax": 0.8, "relax_samples": 100.0}, 300), ({"relax": 0.4, "relax_samples": None}, 0)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        opt = DDPNOpt(model, lr=3.0, **options)
        opt.samples = samples
        F.cross_entropy(model(torch.randn(6, 4)), torch.randint(3, (6,))).backward()
        opt.step()
        assert opt.samples == samples + 6
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*found)


def test_recorded_passes_are_freed_with_or_without_a_step() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    opt = DDPNOpt(model)
    for k in range(6):
        loss = model(torch.randn(5, 4)).square().mean()
        if k % 2:
            loss.backward()
            opt.step()
    del loss
    gc.collect()
    alive = [each for each in gc.get_objects() if type(each) is Recording]
    assert not [each for each in alive if each.arrivals is opt._capture.arrivals]
