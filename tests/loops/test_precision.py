"""Mixed precision: autocast with and without a GradScaler, and what is done to .grad before step()."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from optimizer_networks import Residual, distance, fcn, same, twins, vectors, weights
from torch import nn
from torch.amp import GradScaler

from ddpnopt import DDPNOpt, StepError

OPTIONS: list[dict[str, Any]] = [
    {"value": "outer", "lr": 0.5},
    {"value": "full", "lr": 0.5},
    {"value": "batch"},
    {"value": "outer", "lr": 0.05, "curvature": "kfac"},
    {"value": "batch", "terminal": "cross_entropy"},
    {"value": "outer", "lr": 0.05, "curvature": "kfac", "feedback": False},
    {"value": "outer", "lr": 0.3, "feedback": False},
]
HALVES = pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])


def normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3))


def train(
    model: nn.Module, opt: DDPNOpt, half: torch.dtype | None, scaler: GradScaler | None, steps: int = 3, parts: int = 1
) -> float:
    for seed in range(steps):
        x, y = vectors(8, seed=seed)
        opt.zero_grad()
        for some, labels in zip(x.float().chunk(parts), y.chunk(parts), strict=True):
            with torch.autocast("cpu", half or torch.bfloat16, enabled=half is not None):
                loss = F.cross_entropy(model(some), labels) / parts
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            opt.step()
        else:
            scaler.step(opt)
            scaler.update()
    return loss.item()


@HALVES
@pytest.mark.parametrize("options", OPTIONS)
def test_with_a_scaler_the_steps_are_those_without(options: dict[str, Any], half: torch.dtype) -> None:
    """A scale of 2^8 changes no digit, but those lost where float16 runs out of small numbers."""
    a, b = twins(fcn().float())
    before = weights(a)
    train(a, DDPNOpt(a, **options), half, None)
    train(b, DDPNOpt(b, **options), half, GradScaler("cpu", init_scale=2.0**8))
    assert distance(a, before) > 0.01
    assert distance(a, b) < 0.02 * distance(a, before)


@pytest.mark.filterwarnings("ignore::ddpnopt.OpenLoopWarning")
@pytest.mark.parametrize("make", [normed, Residual])
def test_the_scale_is_taken_off_norms_ledgers_and_accumulated_gradients(make: Any) -> None:
    a, b = twins(make().float())
    before = weights(a)
    train(a, DDPNOpt(a), torch.bfloat16, None, parts=2)
    train(b, DDPNOpt(b), torch.bfloat16, GradScaler("cpu", init_scale=2.0**12), parts=2)
    assert distance(a, b) < 0.02 * distance(a, before)


def test_a_scaler_that_is_switched_off_changes_nothing() -> None:
    a, b = twins(fcn().float())
    train(a, DDPNOpt(a), torch.bfloat16, None)
    train(b, DDPNOpt(b), torch.bfloat16, GradScaler("cpu", enabled=False))
    assert same(a, b)


@pytest.mark.parametrize("weight_grads", [False, True])
def test_an_overflow_leaves_the_weights_is_counted_and_lowers_the_scale(weight_grads: bool) -> None:
    model = fcn().float()
    before = weights(model)
    opt = DDPNOpt(model, weight_grads=weight_grads)
    scaler = GradScaler("cpu", init_scale=2.0**24)  # float16 ends at 2^16
    train(model, opt, torch.float16, scaler, steps=1)
    assert same(model, before)
    assert opt.report.skipped == 1
    assert scaler.get_scale() == 2.0**23
    train(model, opt, torch.float16, scaler, steps=20)
    assert opt.report.skipped < 15
    assert distance(model, before) > 0.01


def test_the_second_sweep_runs_in_the_same_precision() -> None:
    model = fcn().float()
    seen: list[torch.dtype] = []
    model[2].register_forward_hook(lambda module, args, h: seen.append(h.dtype))
    train(model, DDPNOpt(model), torch.float16, GradScaler("cpu", init_scale=256.0), steps=1)
    assert len(seen) >= 3
    assert set(seen) == {torch.float16}


@pytest.mark.parametrize("half", [torch.float16, None])
@pytest.mark.parametrize("value", ["outer", "full", "batch"])
def test_unscaled_and_clipped_gradients_are_followed(value: str, half: torch.dtype | None) -> None:
    """With weight_grads=True clip_grad_norm_ means the loss times the factor by which it has shrunk the gradient."""
    a, b = twins(fcn().float())
    before = weights(a)
    x, y = vectors(8)
    x = x.float()
    opt = DDPNOpt(a, lr=0.5, value=value, weight_grads=True)
    scaler = GradScaler("cpu", init_scale=256.0)
    with torch.autocast("cpu", half or torch.bfloat16, enabled=half is not None):
        loss = F.cross_entropy(a(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    total = float(nn.utils.clip_grad_norm_(a.parameters(), 0.05))
    assert total > 0.06
    scaler.step(opt)
    scaler.update()

    opt = DDPNOpt(b, lr=0.5, value=value)
    with torch.autocast("cpu", half or torch.bfloat16, enabled=half is not None):
        loss = F.cross_entropy(b(x), y)
    (loss * (0.05 / total)).backward()
    opt.step()
    tolerance = 1e-4 if half is None else 0.02
    assert distance(a, b) < tolerance * distance(a, before)


def test_clipping_without_a_scaler_is_followed() -> None:
    a, b = twins(fcn())
    x, y = vectors(8)
    opt = DDPNOpt(a, value="outer", lr=1.0, weight_grads=True)
    F.cross_entropy(a(x), y).backward()
    total = float(nn.utils.clip_grad_norm_(a.parameters(), 0.05))
    opt.step()
    opt = DDPNOpt(b, value="outer", lr=1.0)
    (F.cross_entropy(b(x), y) * (0.05 / (total + 1e-6))).backward()
    opt.step()
    assert distance(a, b) < 1e-12


def scaled_pass(model: nn.Module, opt: DDPNOpt, scaler: GradScaler, *, unscale: bool) -> None:
    x, y = vectors(8)
    opt.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = F.cross_entropy(model(x.float()), y)
    scaler.scale(loss).backward()
    if unscale:
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()


def test_unscaling_before_a_step_without_a_learning_rate_changes_nothing() -> None:
    a, b = twins(fcn().float())
    before = weights(a)
    one, two = DDPNOpt(a), DDPNOpt(b)
    scalers = GradScaler("cpu", init_scale=256.0), GradScaler("cpu", init_scale=256.0)
    for _ in range(5):
        scaled_pass(a, one, scalers[0], unscale=True)
        scaled_pass(b, two, scalers[1], unscale=False)
    assert distance(a, before) > 0
    assert distance(a, b) < 1e-4 * distance(a, before)


def test_unscaling_what_is_not_there_says_what_to_set() -> None:
    model = fcn().float()
    before = weights(model)
    with pytest.raises(StepError, match="weight_grads=True"):
        scaled_pass(model, DDPNOpt(model, lr=1.0), GradScaler("cpu"), unscale=True)
    assert same(model, before)


def test_a_scaler_without_autocast_says_what_to_set() -> None:
    model = fcn().float()
    opt = DDPNOpt(model)
    with pytest.raises(StepError, match=r"autocast.*weight_grads=True"):
        train(model, opt, None, GradScaler("cpu"), steps=1)
    other = copy.deepcopy(model)
    train(other, DDPNOpt(other, weight_grads=True), None, GradScaler("cpu"), steps=1)
    assert distance(model, other) > 0.01


def test_unscaled_gradients_that_are_no_longer_those_of_the_layers_are_refused() -> None:
    model = fcn().float()
    before = weights(model)
    opt = DDPNOpt(model, weight_grads=True)
    scaler = GradScaler("cpu", init_scale=256.0)
    x, y = vectors(8)
    penalty = sum(p.square().sum() for p in model.parameters())
    scaler.scale(F.cross_entropy(model(x.float()), y) + 0.1 * penalty).backward()
    scaler.unscale_(opt)
    with pytest.raises(StepError, match="loss scale is unknown"):
        scaler.step(opt)
    assert same(model, before)
