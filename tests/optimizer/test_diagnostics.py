"""The report says what the last step did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from optimizer_networks import Residual, cnn, fcn, images, train, vectors, weights
from torch import Tensor, nn

from ddpnopt import DDPNOpt

VALUES = pytest.mark.parametrize("value", ["outer", "batch", "full"])
NETS: dict[str, tuple[Callable[[], nn.Module], Callable[..., tuple[Tensor, Tensor]]]] = {
    "fcn": (fcn, vectors),
    "cnn": (cnn, images),
}


def one_step(model: nn.Module, opt: DDPNOpt, loss: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """The change of the loss on the same batch."""
    opt.zero_grad()
    before = loss(model(x))
    before.backward()
    opt.step()
    with torch.no_grad():
        return float(loss(model(x)) - before)


def targets(kind: str, y: Tensor) -> Tensor:
    return y if kind == "cross_entropy" else F.one_hot(y, 3).to(torch.get_default_dtype())


LOSSES: dict[str, Callable[..., Tensor]] = {
    "cross_entropy": F.cross_entropy,
    "binary_cross_entropy": F.binary_cross_entropy_with_logits,
    "squared_error": F.mse_loss,
}


@VALUES
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_actual_is_the_change_of_the_loss_on_the_same_batch(value: str, net: str, kind: str, reduction: str) -> None:
    build, data = NETS[net]
    model = build()
    x, y = data()
    t = targets(kind, y)
    opt = DDPNOpt(model, lr=0.05, value=value, reduction=reduction, diagnostics=True)
    for _ in range(3):
        change = one_step(model, opt, lambda z: LOSSES[kind](z, t, reduction=reduction), x)
        assert opt.report.actual == pytest.approx(change, rel=1e-9, abs=1e-12)
        assert opt.report.loss == kind


@pytest.mark.parametrize("value", ["outer", "batch"])
def test_actual_of_a_residual_network_is_the_change_of_the_loss(value: str) -> None:
    model = Residual()
    x, y = vectors()
    opt = DDPNOpt(model, lr=0.1, value=value, terminal="sqrt", diagnostics=True)
    for _ in range(3):
        change = one_step(model, opt, lambda z: F.cross_entropy(z, y), x)
        assert opt.report.actual == pytest.approx(change, rel=1e-9)


@VALUES
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("curvature", ["identity", "adam", "kfac"])
def test_for_small_steps_the_prediction_comes_true(value: str, net: str, curvature: str) -> None:
    build, data = NETS[net]
    model = build()
    x, y = data()
    opt = DDPNOpt(model, lr=1e-6, value=value, curvature=curvature, diagnostics=True)
    one_step(model, opt, lambda z: F.cross_entropy(z, y), x)
    assert opt.report.predicted is not None
    assert opt.report.actual is not None
    assert opt.report.predicted < 0
    assert opt.report.predicted == pytest.approx(opt.report.actual, rel=1e-3)


def test_the_batch_form_with_sqrt_never_predicts_less_than_no_loss() -> None:
    """Half a square cannot fall below zero, whatever the learning rate."""
    model = fcn()
    x, y = vectors()
    loss = F.cross_entropy(model(x), y).item()
    opt = DDPNOpt(model, lr=1e4, value="batch", terminal="sqrt", diagnostics=True, on_nonfinite="skip")
    one_step(model, opt, lambda z: F.cross_entropy(z, y), x)
    assert opt.report.predicted is not None
    assert -loss * (1 + 1e-9) <= opt.report.predicted < 0


@pytest.mark.parametrize("lr", [1e-3, 1.0, 100.0])
@pytest.mark.parametrize(
    ("value", "guard"), [("batch", None), ("outer", True), ("outer", False), ("full", True), ("full", False)]
)
def test_the_guarded_fraction_is_a_fraction(value: str, lr: float, guard: bool | None) -> None:
    model = fcn()
    opt = DDPNOpt(model, lr=lr, value=value, guard=guard, reduction="sum", diagnostics=True)
    x, y = vectors()
    one_step(model, opt, lambda z: F.cross_entropy(z, y, reduction="sum"), x)
    assert opt.report.guarded is not None
    assert 0 <= opt.report.guarded <= 1
    if value == "outer":
        assert (opt.report.guarded > 0) == (lr > 1e-3)


@VALUES
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("curvature", ["identity", "rmsprop", "ekfac"])
def test_norms_of_each_layer(value: str, net: str, curvature: str) -> None:
    build, data = NETS[net]
    model = build()
    opt = DDPNOpt(model, lr=0.01, value=value, curvature=curvature, diagnostics=True)
    names = [name for name, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    for _ in range(2):
        before = {name: weights(model.get_submodule(name)) for name in names}
        train(model, opt, data, 1)
        assert list(opt.report.layers) == names
        for name, report in opt.report.layers.items():
            moved = [p - q for p, q in zip(weights(model.get_submodule(name)), before[name], strict=True)]
            norm = float(torch.stack([m.square().sum() for m in moved]).sum().sqrt())
            assert report.update == pytest.approx(norm, rel=1e-9)
            assert report.open_loop > 0
            assert (report.feedback > 0) == (name != names[0])


@VALUES
def test_without_momentum_the_update_lies_between_difference_and_sum_of_its_parts(value: str) -> None:
    model = fcn()
    opt = DDPNOpt(model, lr=0.5, value=value, diagnostics=True)
    train(model, opt, vectors, 1)
    for report in opt.report.layers.values():
        assert abs(report.open_loop - report.feedback) - 1e-12 <= report.update
        assert report.update <= report.open_loop + report.feedback + 1e-12


@VALUES
def test_in_open_loop_there_is_no_feedback_and_no_second_pass(value: str) -> None:
    model = fcn()
    opt = DDPNOpt(model, lr=0.1, value=value, closed_loop=False, diagnostics=True)
    train(model, opt, vectors, 2)
    assert [r.feedback for r in opt.report.layers.values()] == [0.0] * 3
    assert all(r.open_loop > 0 for r in opt.report.layers.values())
    assert opt.report.actual is None
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    model[0].register_forward_hook(count)
    train(model, opt, vectors, 1)
    assert passes == (2 if value == "full" else 1)  # the full form looks at what stands between the layers


def test_diagnostics_change_nothing() -> None:
    results = []
    for diagnostics in (True, False):
        torch.manual_seed(0)
        model = fcn()
        train(model, DDPNOpt(model, lr=0.3, diagnostics=diagnostics, momentum=0.9, value="outer"), vectors, 3)
        results.append(weights(model))
    assert all(map(torch.equal, *results))


def test_without_diagnostics_only_what_costs_nothing_is_reported() -> None:
    model = fcn()
    opt = DDPNOpt(model, lr=0.3, value="outer")
    train(model, opt, vectors, 3)
    assert (opt.report.step, opt.report.skipped) == (3, 0)
    assert opt.report.predicted is None
    assert not opt.report.layers


@pytest.mark.filterwarnings("ignore::ddpnopt.OpenLoopWarning")
def test_parameters_without_feedback_are_listed() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.PReLU(), nn.Linear(4, 3))
    opt = DDPNOpt(model, lr=0.1, value="outer", exclude=["2"])
    train(model, opt, vectors, 1)
    assert opt.report.open_loop == ["2.weight"]
