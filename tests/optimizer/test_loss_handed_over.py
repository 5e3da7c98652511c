"""The loss of a step: handed over, returned by a closure, or returned by the model itself."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt import DDPNOpt, OptionError, UncertainLossWarning
from ddpnopt._losses import Losses, are_certain, recognised_losses
from ddpnopt.ddp.evidence import within_reach
from ddpnopt.ddp.loss import UnknownLoss
from ddpnopt.ddp.recognise import FAR
from ddpnopt.trace.micro_batches import MicroBatches, join
from ddpnopt.trace.recording import Recording
from ddpnopt.trace.scalar_outputs import true_loss


def network(outputs: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, outputs))


def data(n: int = 12) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 5), torch.randn(n, 3)


def seen_losses(opt: DDPNOpt, monkeypatch: pytest.MonkeyPatch) -> list[Losses]:
    """The losses that steps work with, as they come."""
    found: list[Losses] = []

    def keep(*args: Any) -> Losses:
        found.append(recognised_losses(*args))
        return found[-1]

    monkeypatch.setattr("ddpnopt._rescale.recognised_losses", keep)
    return found


HANDED_OVER: dict[str, Callable[[DDPNOpt, Tensor], Any]] = {
    "tensor": lambda opt, loss: opt.step(loss=loss),
    "number": lambda opt, loss: opt.step(loss=float(loss.detach())),
    "closure": lambda opt, loss: opt.step(lambda: loss),
}


@pytest.mark.parametrize("form", HANDED_OVER)
@pytest.mark.parametrize("scale", [10.0, 0.01])
def test_the_scale_of_a_squared_error_follows_from_its_value(
    form: str, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = network()
    opt = DDPNOpt(model)
    found = seen_losses(opt, monkeypatch)
    x, y = data()
    loss = scale * F.mse_loss(model(x), y)
    loss.backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        HANDED_OVER[form](opt, loss)
    ((z, each),) = found[0]
    assert (each.kind, each.certain) == ("squared_error", True)
    assert float(each.per_sample(z).sum()) == pytest.approx(float(loss), rel=1e-9)
    assert opt.report.loss == "squared_error"
    assert opt._loss_value is None


def test_the_closure_is_called_once_and_its_loss_returned() -> None:
    model = network()
    opt = DDPNOpt(model)
    x, y = data()
    calls = []

    def closure() -> Tensor:
        calls.append(1)
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    assert float(opt.step(closure)) > 0  # type: ignore[arg-type]
    assert len(calls) == 1


@pytest.mark.parametrize("wrong", [torch.ones(3), "1.0", [1.0]], ids=["vector", "string", "list"])
def test_a_loss_that_is_no_scalar_is_refused(wrong: Any) -> None:
    model = network()
    opt = DDPNOpt(model)
    x, y = data()
    F.mse_loss(model(x), y).backward()
    with pytest.raises(OptionError, match="scalar that backward"):
        opt.step(loss=wrong)


def test_one_warning_says_what_is_assumed_and_how_to_hand_the_loss_over() -> None:
    model = network()
    opt = DDPNOpt(model)
    x, y = data()
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        for _ in range(3):
            opt.zero_grad()
            z = model(x)
            z.backward(2 * (z.detach() - y) / z.numel())  # no scalar: the value of the loss is not seen
            opt.step()
    (found,) = [w for w in record if w.category is UncertainLossWarning]
    assert "mean squared error" in str(found.message)
    assert "opt.step(loss=loss)" in str(found.message)
    assert found.filename == __file__


@pytest.mark.parametrize(
    ("options", "known"),
    [({}, True), ({"value": "outer", "lr": 0.1}, False), ({"feedback": False, "lr": 0.1}, False)],
    ids=["cross-entropy", "no losses needed", "no feedback"],
)
def test_no_warning_where_the_loss_is_certain_or_not_needed(options: dict[str, Any], known: bool) -> None:
    model = network()
    opt = DDPNOpt(model, **options)
    x, y = data()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = F.cross_entropy(model(x), y.argmax(1)) if known else F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
    assert opt.report.loss == ("cross_entropy" if known else None)


def test_clipping_scales_the_value_that_was_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    opt = DDPNOpt(model, weight_grads=True)
    found = seen_losses(opt, monkeypatch)
    x, y = data()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.01))
    opt.step(loss=loss)
    ((z, each),) = found[0]
    within = FAR * within_reach(z, each.q) if isinstance(each, UnknownLoss) else math.inf
    assert float(each.per_sample(z).sum()) == pytest.approx(min(0.01 / norm * float(loss), within), rel=1e-3)


def test_a_grad_scaler_gets_the_loss_before_scaling(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    opt = DDPNOpt(model, weight_grads=True)
    found = seen_losses(opt, monkeypatch)
    x, y = data()
    scaler = torch.amp.GradScaler("cpu")
    loss = F.mse_loss(model(x), y, reduction="sum") / len(x)
    scaler.scale(loss).backward()
    scaler.step(opt, loss=loss)
    ((z, each),) = found[0]
    assert (each.kind, each.certain) == ("squared_error", True)
    assert float(each.per_sample(z).sum()) == pytest.approx(float(loss), rel=1e-6)


def test_micro_batches_hand_over_the_sum_of_their_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    opt = DDPNOpt(model)
    found = seen_losses(opt, monkeypatch)
    x, y = data()
    total = 0.0
    for some, targets in zip(x.chunk(3), y.chunk(3), strict=True):
        loss = 7 * F.mse_loss(model(some), targets) / 3
        loss.backward()
        total += float(loss.detach())
    opt.step(loss=total)
    ((z, each),) = found[0]
    assert (each.kind, each.certain) == ("squared_error", True)
    assert float(each.per_sample(z).sum()) == pytest.approx(total, rel=1e-9)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 3), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.body(x))
        return self.a(h), self.b(h)


def test_of_several_outputs_the_one_not_recognised_gets_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TwoHeads()
    opt = DDPNOpt(model)
    found = seen_losses(opt, monkeypatch)
    x, y = data()
    a, b = model(x)
    parts = F.cross_entropy(a, y.argmax(1)), 5 * F.mse_loss(b, y[:, :2])
    loss = parts[0] + parts[1]
    loss.backward()
    opt.step(loss=loss)
    assert are_certain(found[0])
    assert opt.report.loss == "cross_entropy + squared_error"
    for (z, each), part in zip(found[0], parts, strict=True):
        assert float(each.per_sample(z).sum()) == pytest.approx(float(part), rel=1e-6)


class OwnLoss(nn.Module):
    """The model returns its loss and its outputs, the Hugging Face way."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers, self.loss = network(), loss

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        z = self.layers(x)
        return {"loss": self.loss(z, y), "logits": z}


OWN: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "cross-entropy": (lambda z, y: F.cross_entropy(z, y.argmax(1)), "cross_entropy"),
    "squared error, scaled": (lambda z, y: 10 * F.mse_loss(z, y), "squared_error"),
    "huber": (lambda z, y: F.huber_loss(z, y, delta=0.3), "unknown"),
}


@pytest.mark.parametrize("form", OWN)
def test_the_loss_of_a_model_that_returns_it_is_known_without_a_word(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss_function, kind = OWN[form]
    model = OwnLoss(loss_function)
    opt = DDPNOpt(model)
    found = seen_losses(opt, monkeypatch)
    x, y = data()
    loss = model(x, y)["loss"]
    loss.backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.step()
    ((z, each),) = found[0]
    assert each.kind == kind
    within = FAR * within_reach(z, each.q) if isinstance(each, UnknownLoss) else math.inf
    assert float(each.per_sample(z).sum()) == pytest.approx(min(float(loss), within), rel=1e-6)


@pytest.mark.parametrize("parts", [1, 3])
def test_the_loss_after_the_step_comes_from_the_replay(parts: int) -> None:
    model = OwnLoss(OWN["huber"][0])
    opt = DDPNOpt(model)
    x, y = data()
    chunks = list(zip(x.chunk(parts), y.chunk(parts), strict=True))
    total = sum(model(*chunk)["loss"] / parts for chunk in chunks)
    torch.as_tensor(total).backward()
    capture = opt._capture
    recordings = capture.arrivals.take_all()
    passes: Any = capture if parts == 1 else MicroBatches(capture)
    recording: Recording = recordings[0] if parts == 1 else join(recordings)
    assert true_loss(recording) == pytest.approx(float(total), rel=1e-12)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.9)
    outputs = passes.replay(recording, lambda t, x: None)
    wanted = sum(float(model(*chunk)["loss"]) / parts for chunk in chunks)
    assert true_loss(recording, outputs) == pytest.approx(wanted, rel=1e-12)


def test_a_loss_computed_outside_is_not_taken_from_the_outputs() -> None:
    model = network()
    opt = DDPNOpt(model)
    x, y = data()
    F.mse_loss(model(x), y).backward()
    recording = opt._capture.arrivals.take_all()[0]
    assert true_loss(recording) is None


def test_handing_a_cross_entropy_over_changes_nothing() -> None:
    model = network()
    twin = copy.deepcopy(model)
    x, y = data()
    for each, handed_over in ((model, True), (twin, False)):
        opt = DDPNOpt(each)
        for _ in range(3):
            opt.zero_grad()
            loss = F.cross_entropy(each(x), y.argmax(1))
            loss.backward()
            opt.step(loss=loss if handed_over else None)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("scale", [1.0, 10.0, 1000.0])
def test_training_with_a_scaled_squared_error_converges(scale: float) -> None:
    model = network()
    opt = DDPNOpt(model)
    x, y = data(32)
    first = float(F.mse_loss(model(x), y))
    for _ in range(60):
        opt.zero_grad()
        loss = scale * F.mse_loss(model(x), y)
        loss.backward()
        opt.step(loss=loss)
    assert float(F.mse_loss(model(x), y)) < 0.7 * first


@pytest.mark.filterwarnings("error::ddpnopt.UncertainLossWarning")
def test_a_loss_that_has_been_recognised_is_no_guess_when_it_is_fitted() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))
    x, y = torch.randn(8, 5), torch.arange(8) % 3
    opt = DDPNOpt(model)
    for _ in range(80):
        opt.zero_grad()
        each = F.cross_entropy(model(x), y, reduction="none")
        each.backward(torch.full_like(each, 1 / 8))  # whose value is not seen
        opt.step()
    assert each.mean().item() < 1e-3
