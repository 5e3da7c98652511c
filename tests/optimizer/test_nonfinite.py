"""Numbers that are not finite are refused or skipped, and leave weights and state as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from optimizer_networks import cnn, equal, fcn, images, same, snapshot, train, vectors, weights
from torch import Tensor, nn

from ddpnopt import DDPNOpt, NonFiniteError

VALUES = ["outer", "batch", "full"]


def backward(model: nn.Module, factor: float = 1.0) -> None:
    x, y = vectors()
    (factor * F.cross_entropy(model(x), y)).backward()


CURVATURES = ["identity", "rmsprop", "adam", "kfac", "ekfac"]


def started(value: str, curvature: str = "identity", **options: Any) -> tuple[nn.Module, DDPNOpt]:
    """Two steps in, so that there is state to spoil."""
    model = fcn()
    momentum = 0.0 if curvature == "adam" else 0.9
    opt = DDPNOpt(model, lr=0.01, value=value, curvature=curvature, momentum=momentum, **options)
    train(model, opt, vectors, 2)
    return model, opt


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("curvature", CURVATURES)
@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_raise_leaves_weights_and_state_bit_for_bit(factor: float, curvature: str, value: str) -> None:
    model, opt = started(value, curvature)
    before, state = weights(model), snapshot(opt.state_dict())
    opt.zero_grad()
    backward(model, factor)
    with pytest.raises(NonFiniteError, match=r"not finite.*on_nonfinite='skip'"):
        opt.step()
    assert same(before, model)
    assert equal(state, opt.state_dict())


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("feedback", [True, False])
def test_skip_counts_leaves_everything_and_goes_on(feedback: bool, value: str) -> None:
    model, opt = started(value, on_nonfinite="skip", feedback=feedback)
    before, state = weights(model), snapshot(opt.state_dict())
    for n in (1, 2):
        opt.zero_grad()
        backward(model, float("nan"))
        opt.step()
        assert opt.report.skipped == n
        assert opt.report.step == 2
        assert same(before, model)
        assert equal(state, opt.state_dict())
    train(model, opt, vectors, 1)
    assert opt.report.step == 3
    assert not any(map(torch.equal, before, model.parameters()))


def test_a_skipped_step_leaves_no_trace_in_what_follows() -> None:
    results = []
    for spoil in (True, False):
        torch.manual_seed(0)
        model, opt = started("outer", "adam", on_nonfinite="skip")
        if spoil:
            opt.zero_grad()
            backward(model, float("nan"))
            opt.step()
        train(model, opt, vectors, 3)
        results.append(weights(model))
    assert same(*results)


def huge_step(opt: DDPNOpt, model: nn.Module, data: Callable[..., tuple[Tensor, Tensor]], factor: float) -> None:
    for group in opt.param_groups:
        group["lr"] = 3e38
    x, y = data(seed=7)
    opt.zero_grad()
    (factor * F.cross_entropy(model(x.float()), y)).backward()
    opt.step()


@pytest.mark.parametrize("options", [{"value": "outer"}, {"value": "full"}, {"feedback": False}], ids=str)
@pytest.mark.parametrize("curvature", ["identity", "kfac"])
@pytest.mark.parametrize("net", ["fcn", "cnn"])
def test_an_update_that_overflows_leaves_weights_and_state_bit_for_bit(
    net: str, curvature: str, options: dict[str, Any]
) -> None:
    model, data = (fcn().float(), vectors) if net == "fcn" else (cnn().float(), images)
    opt = DDPNOpt(model, lr=0.01, curvature=curvature, momentum=0.5, **options)
    train(model, opt, data, 2)
    before, state = weights(model), snapshot(opt.state_dict()["state"])
    with pytest.raises(NonFiniteError):
        huge_step(opt, model, data, 1e5)
    assert same(before, model)
    assert equal(state, opt.state_dict()["state"])


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("curvature", CURVATURES)
@pytest.mark.parametrize("net", ["fcn", "cnn"])
def test_whatever_the_learning_rate_the_step_is_refused_or_finite(net: str, curvature: str, value: str) -> None:
    model, data = (fcn().float(), vectors) if net == "fcn" else (cnn().float(), images)
    opt = DDPNOpt(model, lr=0.01, value=value, curvature=curvature, on_nonfinite="skip")
    train(model, opt, data, 2)
    before, state = weights(model), snapshot(opt.state_dict()["state"])
    huge_step(opt, model, data, 1.0)
    if opt.report.skipped:
        assert same(before, model)
        assert equal(state, opt.state_dict()["state"])
    else:
        assert model(data(seed=7)[0].float()).isfinite().all()


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("curvature", CURVATURES)
def test_a_gradient_whose_square_overflows_is_skipped_or_survived(curvature: str, value: str) -> None:
    model = fcn().float()
    opt = DDPNOpt(model, lr=1e-3, value=value, curvature=curvature, on_nonfinite="skip")
    train(model, opt, vectors, 1)
    for group in opt.param_groups:
        group["lr"] = 1e-30
    before = weights(model)
    opt.zero_grad()
    x, y = vectors()
    (1e25 * F.cross_entropy(model(x.float()), y)).backward()
    opt.step()
    assert all(p.isfinite().all() for p in model.parameters())
    assert opt.report.skipped == 0 or same(before, model)


class Spoils(nn.Module):
    """The identity, whose gradient can be made not finite at one number."""

    factor: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.factor is not None and x.requires_grad:
            spoilt = torch.ones_like(x)
            spoilt.view(-1)[-1] = self.factor
            x.register_hook(spoilt.mul)
        return x * 1.0


@pytest.mark.parametrize("steps", [2, 30])
@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
@pytest.mark.parametrize(("network", "data"), [(fcn, vectors), (cnn, images)])
def test_without_lr_a_gradient_inside_the_model_leaves_weights_and_state(
    network: Callable[[], nn.Module], data: Callable[[], tuple[Tensor, Tensor]], factor: float, steps: int
) -> None:
    spoils = Spoils()
    layers = list(network().children())
    model = nn.Sequential(*layers[:2], spoils, *layers[2:])
    opt = DDPNOpt(model)
    train(model, opt, data, steps)
    spoils.factor = factor
    before, state = weights(model), snapshot(opt.state_dict())
    opt.zero_grad()
    x, y = data()
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(NonFiniteError, match=r"not finite.*on_nonfinite='skip'"):
        opt.step()
    assert same(before, model)
    assert equal(state, opt.state_dict())


class Steep(nn.Module):
    """Outputs beyond one are no numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 8), nn.Linear(8, 3)
        nn.init.normal_(self.outer.weight, std=0.01)

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.outer(torch.tanh(self.inner(x)))
        return z * torch.exp(1000 * z.square().clamp_min(0.5) - 500)


def test_a_step_after_which_nothing_is_a_number_is_taken_back_and_training_goes_on() -> None:
    torch.manual_seed(0)
    model = Steep()
    opt = DDPNOpt(model)
    x, y = torch.randn(16, 6), torch.randn(16, 3).clamp(-0.3, 0.3)

    def train_on(steps: int) -> float:
        for _ in range(steps):
            opt.zero_grad()
            F.mse_loss(model(x), y).backward()
            opt.step()
        return F.mse_loss(model(x), y).item()

    before = train_on(5)
    bias = model.outer.bias.detach().clone()
    with torch.no_grad():  # as if the last step had moved it
        model.outer.bias.add_(2.0)
        opt.state[model.outer.weight]["update"][1].sub_(2.0)
    train_on(1)
    assert opt.report.undone == 1
    torch.testing.assert_close(model.outer.bias, bias, rtol=0, atol=0.2)
    assert train_on(10) < before


def test_a_batch_that_holds_no_numbers_is_no_reason_to_take_a_step_back() -> None:
    model = fcn()
    opt = DDPNOpt(model)
    train(model, opt, vectors, 5)
    before = weights(model)
    x, y = vectors()
    opt.zero_grad()
    F.cross_entropy(model(x * torch.nan), y).backward()
    with pytest.raises(NonFiniteError):
        opt.step()
    assert same(before, model)
    assert opt.report.undone == 0


class Windows(nn.Module):
    """The windows of all samples in dimension 0, the first of each sample before the second ones."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.out = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, graph: Tensor) -> Tensor:
        h = torch.tanh(self.inside(x.transpose(0, 1).reshape(-1, 4)))
        z: Tensor = self.out(h.view(x.shape[1], len(x), 6).mean(0))
        return z


class Graphs(Windows):
    """Graphs of unequal numbers of nodes."""

    def forward(self, x: Tensor, graph: Tensor) -> Tensor:
        h = torch.tanh(self.inside(x[graph, graph % x.shape[1]]))
        z: Tensor = self.out(h.new_zeros(len(x), 6).index_add(0, graph, h))
        return z


@pytest.mark.filterwarnings("ignore::ddpnopt.OpenLoopWarning")
@pytest.mark.parametrize("kind", [Windows, Graphs])
def test_a_first_batch_that_is_not_finite_does_not_hide_the_samples_of_later_ones(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, graph = kind(), torch.arange(8).repeat_interleave(torch.arange(1, 9))
    opt = DDPNOpt(model, on_nonfinite="skip")
    for bad in (True, False, False):
        x = torch.randn(8, 5, 4)
        x[2] = torch.nan if bad else x[2]
        opt.zero_grad()
        F.cross_entropy(model(x, graph), torch.arange(8) % 3).backward()
        opt.step()
    assert opt.report.skipped == 1
    assert not opt.report.open_loop
