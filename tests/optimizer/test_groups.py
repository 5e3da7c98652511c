"""Schedulers, parameter groups and frozen layers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizer_networks import cnn, distance, fcn, images, same, train, twins, vectors, weights
from torch import nn

from ddpnopt import DDPNOpt

VALUES = pytest.mark.parametrize("value", ["outer", "batch", "full"])
Schedule = torch.optim.lr_scheduler


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


def test_a_group_added_later_is_trained_with_feedback() -> None:
    model = fcn()
    opt = DDPNOpt(model, 0.1, params=model[0].parameters(), value="outer")
    before = weights(model)
    train(model, opt, vectors, 1)
    assert same(before[2:], weights(model)[2:])
    opt.add_param_group({"params": model[4].parameters()})
    train(model, opt, vectors, 1)
    moved = [not torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True)]
    assert moved == [True, True, False, False, True, True]


@pytest.mark.parametrize("replace", [False, True], ids=["appended", "in place of the last one"])
def test_a_layer_that_the_model_was_given_later_is_trained_with_feedback(replace: bool) -> None:
    model = fcn()
    opt = DDPNOpt(model)
    train(model, opt, vectors, 2)
    last = len(model) - 1
    new = nn.Linear(model[last].in_features if replace else model[last].out_features, model[last].out_features)
    if replace:
        model[last] = new
    else:
        model.append(new)
    opt.add_param_group({"params": new.parameters()})
    before = weights(new)
    train(model, opt, vectors, 2)
    assert opt.report.open_loop == []
    assert not any(torch.equal(p, q) for p, q in zip(before, new.parameters(), strict=True))


def test_a_new_layer_without_its_parameters_stays_as_it_is() -> None:
    model = fcn()
    opt = DDPNOpt(model)
    train(model, opt, vectors, 1)
    model.append(nn.Linear(model[-1].out_features, model[-1].out_features))
    before = weights(model[-1])
    train(model, opt, vectors, 1)
    assert same(before, weights(model[-1]))


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


@VALUES
def test_a_layer_that_was_frozen_from_the_start_is_trained_once_it_is_not(value: str) -> None:
    model = fcn()
    first = next(m for m in model if isinstance(m, nn.Linear))
    first.requires_grad_(False)
    opt = DDPNOpt(model, lr=0.1, value=value)
    schedule = Schedule.StepLR(opt, 2, 0.9)
    train(model, opt, vectors, 2)
    kept = first.weight.detach().clone()
    first.requires_grad_(True)
    train(model, opt, vectors, 2)
    schedule.step()
    assert not torch.equal(first.weight, kept)
    assert opt.report.open_loop == []
    again = DDPNOpt(copy.deepcopy(model), lr=0.1, value=value)
    again.load_state_dict(opt.state_dict())  # in the order of the model


def test_parameters_left_out_of_the_groups_stay_as_they_are_when_they_are_unfrozen() -> None:
    model = fcn()
    first, *others = [m for m in model if isinstance(m, nn.Linear)]
    first.requires_grad_(False)
    opt = DDPNOpt(model, params=[p for m in others for p in m.parameters()])
    train(model, opt, vectors, 2)
    kept = first.weight.detach().clone()
    first.requires_grad_(True)
    train(model, opt, vectors, 2)
    assert torch.equal(first.weight, kept)
