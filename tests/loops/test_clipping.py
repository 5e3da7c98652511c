"""`clip_grad_norm_` in the training loop: one warning, and from the second step on it does what people expect."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt import DDPNOpt
from ddpnopt.errors import TrainingWarning


def _task() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), torch.randn(32, 6), torch.randint(3, (32,))


def _steps(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    opt: torch.optim.Optimizer,
    count: int,
    clip: float | None = None,
    **how: Any,
) -> list[float]:
    norms = []
    for _ in range(count):
        opt.zero_grad(**how)
        F.cross_entropy(model(x), y).backward()
        if clip is not None:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        opt.step()
    return norms


def test_clipping_without_gradients_is_told_once_and_then_returns_the_norm() -> None:
    model, x, y = _task()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        norms = _steps(model, x, y, DDPNOpt(model), 6, clip=1.0)
    told = [w for w in caught if issubclass(w.category, TrainingWarning)]
    assert len(told) == 1
    assert "clip_grad_norm_" in str(told[0].message)
    assert norms[0] == 0
    assert min(norms[1:]) > 0


def test_from_the_second_step_on_clipping_is_that_of_weight_grads() -> None:
    model, x, y = _task()
    twin = copy.deepcopy(model)
    a = DDPNOpt(model, value="outer", lr=0.5)
    b = DDPNOpt(twin, value="outer", lr=0.5, weight_grads=True)
    with pytest.warns(TrainingWarning, match="clip_grad_norm_"):
        _steps(model, x, y, a, 1, clip=100.0)
    _steps(twin, x, y, b, 1, clip=100.0)  # no effect on either
    assert _steps(model, x, y, a, 3, clip=0.01) == pytest.approx(_steps(twin, x, y, b, 3, clip=0.01), rel=1e-5)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("how", [{}, {"set_to_none": False}], ids=["to none", "to zero"])
def test_without_clipping_nothing_is_told_and_gradients_stay_empty(how: dict[str, Any]) -> None:
    model, x, y = _task()
    opt = DDPNOpt(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _steps(model, x, y, opt, 6, **how)
    opt.zero_grad()
    F.cross_entropy(model(x), y).backward()
    assert all(p.grad is None for p in model.parameters())


def test_a_penalty_on_the_weights_is_not_taken_for_clipping() -> None:
    model, x, y = _task()
    opt = DDPNOpt(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", TrainingWarning)
        for _ in range(5):
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y) + 0.01 * sum(p.square().sum() for p in model.parameters())
            loss.backward()
            opt.step()


def test_micro_batches_are_not_taken_for_clipping() -> None:
    model, x, y = _task()
    opt = DDPNOpt(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", TrainingWarning)
        for _ in range(5):
            opt.zero_grad()
            for some in range(0, 32, 16):
                (F.cross_entropy(model(x[some : some + 16]), y[some : some + 16]) / 2).backward()
            opt.step()


def _equation(model: nn.Module, x: Tensor) -> Tensor:
    slope = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
    return (slope - 1).square().mean()


@pytest.mark.parametrize("clip", [None, 1.0], ids=["without clipping", "with clipping"])
def test_clipping_is_told_where_derivatives_are_in_the_loss(clip: float | None) -> None:
    model, x, _ = _task()
    x.requires_grad_()
    opt = DDPNOpt(model)
    norms = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            opt.zero_grad()
            _equation(model, x).backward()
            if clip is not None:
                norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
            opt.step()
    told = [w for w in caught if issubclass(w.category, TrainingWarning)]
    assert [norm > 0 for norm in norms[:3]] == ([] if clip is None else [False, True, True])
    assert len(told) == (clip is not None)


def test_a_derivative_that_is_not_in_the_loss_leaves_no_gradient_behind() -> None:
    model, x, _ = _task()
    x.requires_grad_()
    opt = DDPNOpt(model)
    torch.autograd.grad(model(x).sum(), x, create_graph=True)
    assert all(p.grad is None for p in model.parameters())
    _equation(model, x).backward()
    opt.step()
