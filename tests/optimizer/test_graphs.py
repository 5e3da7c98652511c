"""Networks of any graph, with any inputs and outputs, get the same step as their plain equivalents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from optimizer_networks import distance, fcn, same, twins, vectors, weights
from replay_networks import (
    Heads,
    OtherOrder,
    loss_of,
    step,
)
from torch import Tensor, nn

from ddpnopt import DDPNOpt

pytestmark = pytest.mark.filterwarnings("ignore::ddpnopt.OpenLoopWarning")


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 6), nn.Linear(6, 4), nn.Linear(4, 3)])

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(len(x), -1).contiguous()
        return self.layers[2](torch.tanh(self.layers[1](F.tanh(self.layers[0](x)))))


@pytest.mark.parametrize("value", ["outer", "batch", "full"])
@pytest.mark.parametrize("other", [Functional, OtherOrder])
def test_functional_activations_and_another_order_of_definition_equal_the_sequential(
    other: type[nn.Module], value: str
) -> None:
    plain, model = fcn(), other()
    layers = list(model.layers) if other is Functional else [model.a, model.b, model.c]
    for source, target in zip((plain[0], plain[2], plain[4]), layers, strict=True):
        target.load_state_dict(source.state_dict())
    for net in (plain, model):
        opt = DDPNOpt(net, lr=0.5, value=value)
        for _ in range(3):
            step(net, opt, loss_of(*vectors()))
    for source, target in zip((plain[0], plain[2], plain[4]), layers, strict=True):
        assert torch.equal(source.weight, target.weight)


@pytest.mark.parametrize("value", ["outer", "batch", "full"])
def test_keyword_inputs_equal_positional_ones(value: str) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.net = fcn()

        def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
            return self.net(x * factor)

    a, b = Named(), Named()
    x, y = vectors()
    for model, args, kwargs in ((a, (x, 0.5), {}), (b, (), {"factor": 0.5, "x": x})):
        opt = DDPNOpt(model, lr=0.5, value=value)
        for _ in range(2):
            opt.zero_grad()
            F.cross_entropy(model(*args, **kwargs), y).backward()
            opt.step()
    assert same(a, b)


def test_a_layer_called_with_a_keyword_equals_the_positional_call() -> None:
    class Keyword(nn.Module):
        def __init__(self, keyword: bool) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.a, self.b, self.keyword = nn.Linear(5, 4), nn.Linear(4, 3), keyword

        def forward(self, x: Tensor) -> Tensor:
            return self.b(input=torch.tanh(self.a(input=x))) if self.keyword else self.b(torch.tanh(self.a(x)))

    models = Keyword(True), Keyword(False)
    for model in models:
        opt = DDPNOpt(model, lr=0.5, value="outer")
        for _ in range(2):
            step(model, opt, loss_of(*vectors()))
    assert same(*models)


@pytest.mark.parametrize(
    "terminal", ["gn", "sqrt", lambda z: torch.softmax(z, 1), "sampled"], ids=["gn", "sqrt", "callable", "sampled"]
)
@pytest.mark.parametrize("value", ["outer", "batch"])
def test_features_returned_beside_the_output_change_nothing(value: str, terminal: Any) -> None:
    class WithFeatures(nn.Module):
        def __init__(self, show: bool) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.a, self.b, self.c, self.show = nn.Linear(5, 6), nn.Linear(6, 4), nn.Linear(4, 3), show

        def forward(self, x: Tensor) -> Any:
            x = torch.tanh(self.a(x))
            y = torch.tanh(self.b(x))
            return (self.c(y), [x, y]) if self.show else (self.c(y), [])

    models = WithFeatures(True), WithFeatures(False)
    x, y = vectors()
    for model in models:
        torch.manual_seed(0)
        opt = DDPNOpt(model, lr=0.5, value=value, terminal=terminal)
        for _ in range(2):
            opt.zero_grad()
            F.cross_entropy(model(x)[0], y).backward()
            opt.step()
    assert same(*models)


@pytest.mark.parametrize("value", ["outer", "batch"])
def test_outputs_in_a_dict_tuple_or_named_tuple_are_the_same(value: str) -> None:
    class Pair(NamedTuple):
        one: Tensor
        two: Tensor

    class Wrapped(nn.Module):
        def __init__(self, wrap: Callable[[Tensor, Tensor], Any]) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.heads, self.wrap = Heads(), wrap

        def forward(self, x: Tensor) -> Any:
            out = self.heads(x)
            return self.wrap(out["one"], out["two"]["inner"][0])

    models = []
    x, y = vectors()
    for wrap, read in (
        (lambda a, b: (a, b), lambda out: out),
        (lambda a, b: {"a": a, "b": b}, lambda out: (out["a"], out["b"])),
        (Pair, lambda out: (out.one, out.two)),
        (lambda a, b: [[a], {"b": b}], lambda out: (out[0][0], out[1]["b"])),
    ):
        model = Wrapped(wrap)
        opt = DDPNOpt(model, lr=0.5, value=value, terminal="sqrt")
        for _ in range(2):
            opt.zero_grad()
            one, two = read(model(x))
            (F.cross_entropy(one, y) + F.mse_loss(two, x[:, :2])).backward()
            opt.step()
        models.append(model)
    assert all(same(models[0], other) for other in models[1:])


def test_a_model_that_returns_its_own_loss_equals_one_that_returns_outputs() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.net = fcn()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.net(x), y)

    own = Own()
    torch.manual_seed(1)
    plain = fcn()
    x, y = vectors()
    opts = DDPNOpt(own, lr=0.5, terminal="sqrt", value="outer"), DDPNOpt(plain, lr=0.5, terminal="sqrt", value="outer")
    for _ in range(2):
        for opt, loss in zip(opts, (lambda: own(x, y), lambda: F.cross_entropy(plain(x), y)), strict=True):
            opt.zero_grad()
            loss().backward()
            opt.step()
    assert distance(own, plain) < 1e-12


@pytest.mark.parametrize("bias", [True, False])
def test_a_model_that_is_a_single_layer(bias: bool) -> None:
    a, b = twins(nn.Linear(5, 3, bias=bias))
    step(a, DDPNOpt(a, lr=0.5, value="outer"), loss_of(*vectors()))
    step(b, torch.optim.SGD(b.parameters(), 0.5), loss_of(*vectors()))
    assert distance(a, b) < 1e-14


def test_an_unused_layer_and_a_detached_one_stay_as_they_are() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.idle, self.detached, self.c = (
                nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3),
            )  # fmt: skip

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.a(x))
            return self.c(x + self.detached(x).detach())

    model = Idle()
    before = weights(model.idle) + weights(model.detached)
    first = model.a.weight.detach().clone()
    opt = DDPNOpt(model, lr=0.5, value="outer")
    for _ in range(2):
        step(model, opt, loss_of(*vectors()))
    assert same(before, weights(model.idle) + weights(model.detached))
    assert not torch.equal(first, model.a.weight)


def test_an_input_that_wants_a_gradient_gets_it_and_the_step_is_the_same() -> None:
    a, b = twins(fcn())
    x, y = vectors()
    wanting = x.clone().requires_grad_()
    step(a, DDPNOpt(a, lr=0.5, value="outer"), loss_of(wanting, y))
    step(b, DDPNOpt(b, lr=0.5, value="outer"), loss_of(x, y))
    assert wanting.grad is not None
    assert same(a, b)


def test_two_optimizers_share_a_model() -> None:
    model = fcn()
    ends, middle = [*model[0].parameters(), *model[4].parameters()], list(model[2].parameters())
    one, two = DDPNOpt(model, lr=0.1, params=ends, value="outer"), DDPNOpt(model, lr=0.2, params=middle, value="outer")
    before = weights(model)
    for _ in range(2):
        one.zero_grad()
        two.zero_grad()
        loss_of(*vectors())(model).backward()
        one.step()
        two.step()
    assert not any(torch.equal(p, q) for p, q in zip(before, weights(model), strict=True))


@pytest.mark.parametrize("first", [True, False], ids=["on constant input", "behind a layer"])
@pytest.mark.parametrize("value", ["outer", "batch", "full"])
def test_a_layer_on_tokens_is_trained_although_its_output_is_overwritten(value: str, first: bool) -> None:
    """Its output is a view, and work in place on a view rewrites the history of its base."""
    x, y = torch.randn(6, 3, 5), vectors(6)[1]

    def net(inplace: bool) -> nn.Sequential:
        torch.manual_seed(1)
        before = [] if first else [nn.Linear(5, 5), nn.Tanh()]
        return nn.Sequential(*before, nn.Linear(5, 4), nn.ReLU(inplace), nn.Flatten(), nn.Linear(12, 3))

    models = net(True), net(False)
    for model in models:
        opt = DDPNOpt(model, lr=0.5, value=value, diagnostics=True)
        for _ in range(3):
            step(model, opt, loss_of(x, y))
        assert len(opt.report.layers) == (2 if first else 3)
    assert distance(*models) < 1e-13


@pytest.mark.filterwarnings("ignore::ddpnopt.OpenLoopWarning")
@pytest.mark.parametrize("terminal", ["cross_entropy", "mse", "sampled"])
def test_batch_norm_goes_with_every_terminal_curvature(terminal: str) -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3))
    opt = DDPNOpt(model, lr=0.1, terminal=terminal)
    x, y = vectors()
    losses = [F.cross_entropy(model(x), y).item()]
    for _ in range(5):
        step(model, opt, loss_of(x, y))
        losses.append(F.cross_entropy(model(x), y).item())
    assert losses[-1] < losses[0]


class Nodes(nn.Module):
    """The rows are nodes of one graph: each layer reads a mean over neighbours."""

    def __init__(self, neighbours: Tensor) -> None:
        super().__init__()
        self.a, self.b, self.neighbours = nn.Linear(5, 6), nn.Linear(6, 3), neighbours

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.neighbours @ self.a(x))
        found: Tensor = self.neighbours @ self.b(h)
        return found


def test_where_samples_are_mixed_between_layers_a_small_step_does_what_is_predicted() -> None:
    x, y = vectors(12)
    neighbours = torch.rand(12, 12).pow(3)
    model = Nodes(neighbours / neighbours.sum(1, keepdim=True))
    opt = DDPNOpt(model, diagnostics=True)
    opt.param_groups[0]["lr"] = 1e-3
    for _ in range(3):
        opt.zero_grad()
        loss = F.cross_entropy(model(x)[:6], y[:6])  # the other nodes have no label
        loss.backward()
        opt.step()
        assert opt.report.predicted is not None
        after = float(F.cross_entropy(model(x)[:6], y[:6]).detach())
        assert after - float(loss.detach()) == pytest.approx(opt.report.predicted, rel=0.01)
