"""The optimizer in the user's loop: closures, zero_grad, schedulers, parameter groups, frozen layers, other passes."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from optimizer_networks import batches, distance, fcn, same, train, twins, vectors, weights
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


def test_hooks_on_the_step_are_called_and_a_profiler_shows_it() -> None:
    model = fcn()
    opt = DDPNOpt(model)
    called: list[str] = []
    before = opt.register_step_pre_hook(lambda *_: called.append("before"))
    after = opt.register_step_post_hook(lambda *_: called.append("after"))
    train(model, opt, vectors, 1)
    before.remove()
    after.remove()
    train(model, opt, vectors, 1)
    assert called == ["before", "after"]
    with torch.profiler.profile() as profile:
        train(model, opt, vectors, 1)
    names = {event.name for event in profile.events()}
    assert {"Optimizer.zero_grad#DDPNOpt.zero_grad", "Optimizer.step#DDPNOpt.step"} <= names


def test_a_derivative_by_the_outputs_is_no_backward_pass() -> None:
    a, b = twins(fcn())
    for model in (a, b):
        opt = DDPNOpt(model)
        for x, y in batches(vectors, 3):
            opt.zero_grad()
            outputs = model(x)
            loss = F.cross_entropy(outputs, y)
            if model is b:
                torch.autograd.grad(loss, outputs, retain_graph=True)
            loss.backward()
            opt.step()
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
