"""What makes a step cheap changes nothing in it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from optimizer_networks import Residual, distance, same, twins, vectors, weights
from torch import Tensor, nn

import ddpnopt._step
from ddpnopt import DDPNOpt, NonFiniteError
from ddpnopt.lab import baselines
from ddpnopt.trace.hooks import Capture


def chain() -> nn.Sequential:
    inner = nn.Sequential(nn.Linear(8, 6), nn.Tanh())
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.3), inner, nn.Linear(6, 3))


def train(model: nn.Module, opt: torch.optim.Optimizer, steps: int = 4) -> None:
    for k in range(steps):
        torch.manual_seed(k)
        x, y = vectors(12)
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()


@pytest.mark.parametrize("value", ["batch", "outer"])
def test_a_sequential_without_the_detour_over_hooks_takes_the_same_steps(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    walked: list[nn.Module] = []
    real = Capture._in_sequence

    def in_sequence(capture: Capture, recording: Any) -> list[nn.Module] | None:
        found = real(capture, recording)
        if found is not None:
            walked.append(capture.model)
        return found

    monkeypatch.setattr(Capture, "_in_sequence", in_sequence)
    plain, listened = twins(chain())
    seen: list[Tensor] = []
    listened[0].register_forward_hook(lambda m, args, h: seen.append(h))
    for model in (plain, listened):
        train(model, DDPNOpt(model, lr=0.3, value=value))
    assert same(plain, listened)
    assert len(walked) >= 4
    assert all(model is plain for model in walked)
    assert len(seen) >= 8  # whoever else listens hears both passes


def test_a_forward_pass_put_into_a_sequential_by_somebody_else_is_respected() -> None:
    model = chain()
    inside: list[int] = []
    real = model.forward

    def forward(x: Tensor) -> Tensor:
        inside.append(len(x))
        return real(x)

    model.forward = forward  # type: ignore[method-assign]
    train(model, DDPNOpt(model), steps=1)
    assert len(inside) >= 2


@pytest.mark.parametrize("network", [chain, Residual])
@pytest.mark.parametrize("options", [{}, {"value": "outer", "lr": 0.1}, {"terminal": "cross_entropy"}], ids=str)
def test_applying_a_layer_again_or_catching_slopes_at_its_input_is_the_same_step(
    network: Any, options: dict[str, Any]
) -> None:
    again, caught = twins(network())
    train(again, DDPNOpt(again, **options))
    train(caught, DDPNOpt(caught, recompute=False, **options))
    assert distance(again, caught) < 1e-10


def test_kfac_without_feedback_looks_at_the_layers_only_when_it_refreshes() -> None:
    model, always = twins(chain())
    opt, other = baselines.KFACOptimizer(model, 0.1, refresh=3), baselines.KFACOptimizer(always, 0.1, refresh=3)
    other._watch = lambda: None  # type: ignore[method-assign]
    looked = []
    for k in range(7):
        looked.append(opt._capture.enabled)
        for each, optimizer in ((model, opt), (always, other)):
            torch.manual_seed(k)
            x, y = vectors(12)
            optimizer.zero_grad()
            F.cross_entropy(each(x), y).backward()
            optimizer.step()
    assert looked == [True, False, False, True, False, False, True]
    assert same(model, always)


def test_kfac_takes_up_its_rhythm_again_from_a_saved_state() -> None:
    model, copy = twins(chain())
    opt = baselines.KFACOptimizer(model, 0.1, refresh=3)
    train(model, opt, steps=2)
    copy.load_state_dict(model.state_dict())
    again = baselines.KFACOptimizer(copy, 0.1, refresh=3)
    again.load_state_dict(opt.state_dict())
    assert not again._capture.enabled
    train(model, opt)
    train(copy, again)
    assert same(model, copy)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("network", [chain, Residual])
@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"curvature": "kfac"}, {"diagnostics": True}], ids=str)
@pytest.mark.parametrize("risen", [1, 2, 4])
def test_a_step_that_would_raise_the_loss_is_repeated_for_a_quarter_of_what_was_asked(
    risen: int, options: dict[str, Any], network: Any, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, wanted = twins(network().double())
    before = weights(model)

    def step(each: nn.Module, opt: DDPNOpt) -> None:
        torch.manual_seed(0)
        x, y = vectors(12)
        opt.zero_grad()
        for some, labels in zip(x.chunk(parts), y.chunk(parts), strict=True):
            (F.cross_entropy(each(some), labels) / parts).backward()
        opt.step()

    if risen < 4:
        step(wanted, DDPNOpt(wanted, lr=0.1, relax=0.25**risen, relax_samples=None, **options))
    asked: list[float] = []

    def loss(*args: Any) -> float:
        asked.append(real(*args))
        return math.inf if len(asked) <= risen else asked[-1]

    real = ddpnopt._step.total_loss
    monkeypatch.setattr(ddpnopt._step, "total_loss", loss)
    monkeypatch.setattr(ddpnopt._step.Step, "_write_report", lambda *args: None)  # it asks, too
    opt = DDPNOpt(model, lr=0.1, relax_samples=None, **options)
    step(model, opt)
    assert (opt.report.shortened, opt.report.undone) == (1, risen == 4)
    if risen < 4:
        assert distance(before, model) > 1e-6
        assert distance(model, wanted) < 1e-12
    else:
        assert same(model, before)


def test_algebra_in_float32_follows_float64_at_an_enormous_learning_rate() -> None:
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    narrow = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 3)).float()
    narrow.load_state_dict(wide.state_dict())
    x, y = torch.randn(96, 10, dtype=torch.float64), torch.randint(3, (96,))
    for model, inputs in ((wide, x), (narrow, x.float())):
        opt = DDPNOpt(model, lr=1e7)
        opt.zero_grad()
        F.cross_entropy(model(inputs), y).backward()
        opt.step()
    for a, b in zip(wide.parameters(), narrow.parameters(), strict=True):
        torch.testing.assert_close(a.detach(), b.detach().double(), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    "optimizer", [baselines.KFACOptimizer, lambda model, lr: DDPNOpt(model, lr=lr, feedback=False)]
)
def test_a_step_that_overflows_gives_back_the_only_parameter_there_is(optimizer: Any) -> None:
    model = nn.Linear(5, 3, bias=False)
    before = weights(model)
    opt = optimizer(model, math.inf)
    x, y = vectors(12)
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(NonFiniteError):
        opt.step()
    assert same(model, before)


def test_an_argument_that_is_neither_tensor_nor_container_is_no_obstacle() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, x: Tensor, weights: Any, flags: dict[str, Any]) -> Tensor:
            return self.layer(x * torch.from_numpy(weights)) if not flags else x

    model = Weighted()
    before = weights(model)
    opt = DDPNOpt(model)
    x, y = vectors(12)
    F.cross_entropy(model(x, np.ones(5), {}), y).backward()
    opt.step()
    assert not same(model, before)
