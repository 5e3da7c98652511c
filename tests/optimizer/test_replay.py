"""The forward sweep is the same forward pass once more, whatever the network does in it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from optimizer_networks import Residual, distance, fcn, outer_step, same, twins, vectors, weights
from torch import Tensor, nn

from ddpnopt import DDPNOpt

pytestmark = pytest.mark.filterwarnings("ignore::ddpnopt.OpenLoopWarning")


# -- networks ----------------------------------------------------------------------------------------------------------


class Dropouts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 8), nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(torch.tanh(self.a(x)), 0.4, self.training)
        return self.c(F.dropout(torch.relu(self.b(x)), 0.3, self.training))


class BatchNorms(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(8, 6),
            nn.BatchNorm1d(6, momentum=None), nn.Tanh(), nn.Linear(6, 3),
        )  # fmt: skip


class Branches(nn.Module):
    """Two branches, one deeper than the other, concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left = nn.Linear(5, 4), nn.Linear(4, 3)
        self.right, self.deeper, self.head = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.softplus(self.stem(x))
        left, right = torch.tanh(self.left(x)), torch.tanh(self.deeper(torch.tanh(self.right(x))))
        return self.head(torch.cat([left, right], 1))


class OtherOrder(nn.Module):
    """Layers defined last to first."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.b, self.a = nn.Linear(4, 3), nn.Linear(6, 4), nn.Linear(5, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


class TwoInputs(nn.Module):
    """Positional and keyword inputs, one of them optional and not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 4), nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, scale: float = 1.0, *, extra: Tensor) -> Tensor:
        return self.c(torch.tanh(self.a(x)) * scale + torch.tanh(self.b(extra)))


class Heads(nn.Module):
    """Two outputs in a dict, beside one that is not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.one, self.two = nn.Linear(5, 4), nn.Linear(4, 3), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> dict[str, Any]:
        x = torch.tanh(self.trunk(x))
        return {"one": self.one(x), "two": {"inner": (self.two(x),)}, "name": "heads", "nothing": None}


class Tokens(nn.Module):
    """Linear on (B, tokens, n), with a residual sum and a mean over the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(x))
        x = x + torch.tanh(self.b(x))
        return self.c(x.mean(1))


def loss_of(x: Tensor, y: Tensor) -> Callable[[nn.Module], Tensor]:
    return lambda model: F.cross_entropy(model(x), y)


def two_inputs_loss(model: nn.Module) -> Tensor:
    x, y = vectors()
    return F.cross_entropy(model(x, scale=0.7, extra=vectors(inputs=3, seed=5)[0]), y)


def heads_loss(model: nn.Module) -> Tensor:
    x, y = vectors()
    out = model(x)
    return F.cross_entropy(out["one"], y) + F.mse_loss(out["two"]["inner"][0], x[:, :2])


TOKENS = torch.randn(8, 4, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
CASES: dict[str, tuple[type[nn.Module], Callable[[nn.Module], Tensor], bool]] = {
    "fcn": (fcn, loss_of(*vectors()), True),
    "dropout": (Dropouts, loss_of(*vectors()), True),
    "batch norm": (BatchNorms, loss_of(*vectors()), True),
    "residual": (Residual, loss_of(*vectors()), False),
    "branches": (Branches, loss_of(*vectors()), False),
    "other order": (OtherOrder, loss_of(*vectors()), True),
    "two inputs": (TwoInputs, two_inputs_loss, False),
    "heads": (Heads, heads_loss, False),
    "tokens": (Tokens, loss_of(TOKENS, vectors()[1]), False),
}
EACH = pytest.mark.parametrize("case", CASES)


def make(case: str) -> tuple[nn.Module, Callable[[nn.Module], Tensor], bool]:
    build, loss, chain = CASES[case]
    return build(), loss, chain


def step(model: nn.Module, opt: DDPNOpt, loss: Callable[[nn.Module], Tensor]) -> None:
    opt.zero_grad()
    loss(model).backward()
    opt.step()


# -- the pass itself ---------------------------------------------------------------------------------------------------


@EACH
@pytest.mark.parametrize("value", ["outer", "batch"])
def test_with_unchanged_weights_every_module_sees_the_same_in_all_passes(case: str, value: str) -> None:
    model, loss, _ = make(case)
    opt = DDPNOpt(model, lr=0.0, value=value, open_loop_lr=0.0)
    passes: list[list[Tensor]] = []

    def remember(module: nn.Module, args: Any, output: Any) -> None:
        passes[-1].append(output.detach().clone())

    model.register_forward_pre_hook(lambda *_: passes.append([]))
    for module in model.modules():
        if not list(module.children()):
            module.register_forward_hook(remember)
    for _ in range(2):
        passes.clear()
        step(model, opt, loss)
        first, *more = passes
        assert more
        for again in more:
            assert len(first) == len(again)
            assert all(map(torch.equal, first, again))


@pytest.mark.parametrize("case", [case for case in CASES if case != "batch norm"])  # which couples the samples
def test_two_steps_equal_the_plain_reference(case: str) -> None:
    model, loss, chain = make(case)
    a, b = twins(model)
    opt = DDPNOpt(a, lr=0.8, value="outer")
    for seed in range(2):
        torch.manual_seed(seed)
        step(a, opt, loss)
        torch.manual_seed(seed)
        outer_step(b, loss, 0.8, chain=chain)
        assert distance(a, b) < 1e-12


@EACH
@pytest.mark.parametrize("value", ["outer", "batch"])
def test_random_stream_goes_on_as_without_a_second_pass(case: str, value: str) -> None:
    model, loss, _ = make(case)
    opt = DDPNOpt(model, lr=0.1, value=value)
    for seed in range(2):
        torch.manual_seed(seed)
        loss(model)
        expected = torch.rand(5)
        torch.manual_seed(seed)
        opt.zero_grad()
        loss(model).backward()
        between = torch.rand(2)
        opt.step()
        assert torch.equal(torch.cat([between, torch.rand(3)]), expected)


@pytest.mark.parametrize("value", ["outer", "batch"])
def test_batch_norm_statistics_are_updated_once(value: str) -> None:
    model, loss, _ = make("batch norm")
    opt = DDPNOpt(model, lr=0.1, value=value)
    for n in range(1, 4):
        opt.zero_grad()
        loss(model).backward()
        after_forward = [b.clone() for b in model.buffers()]
        opt.step()
        assert all(map(torch.equal, after_forward, model.buffers()))
        assert model[1].num_batches_tracked == n


def test_a_buffer_that_the_forward_pass_replaces_is_updated_once() -> None:
    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(6))

        def forward(self, x: Tensor) -> Tensor:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)  # a new tensor each time
            return x - self.mean

    model = nn.Sequential(nn.Linear(5, 6), Running(), nn.Tanh(), nn.Linear(6, 3))
    opt = DDPNOpt(model, lr=0.1, value="outer")
    x, y = vectors()
    opt.zero_grad()
    F.cross_entropy(model(x), y).backward()
    after_forward = model[1].mean.clone()
    opt.step()
    assert torch.equal(model[1].mean, after_forward)


@pytest.mark.parametrize("value", ["outer", "batch", "full"])
def test_in_place_activation_equals_out_of_place(value: str) -> None:
    def net(inplace: bool) -> nn.Sequential:
        torch.manual_seed(1)
        return nn.Sequential(
            nn.Linear(5, 8), nn.ReLU(inplace), nn.Linear(8, 6), nn.ELU(inplace=inplace), nn.Linear(6, 3)
        )

    models = net(True), net(False)
    for model in models:
        opt = DDPNOpt(model, lr=0.5, value=value)
        for _ in range(3):
            step(model, opt, loss_of(*vectors()))
    assert distance(*models) < 1e-13


@pytest.mark.parametrize("value", ["outer", "batch"])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_in_place_activation_after_a_convolution_on_constant_input(dims: int, value: str) -> None:
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    x = torch.randn(4, 2, *[4] * dims)

    def net(inplace: bool) -> nn.Sequential:
        torch.manual_seed(1)
        return nn.Sequential(conv(2, 3, 3), nn.ReLU(inplace), nn.Flatten(), nn.Linear(3 * 2**dims, 3))

    models = net(True), net(False)
    for model in models:
        opt = DDPNOpt(model, lr=0.5, value=value)
        for _ in range(2):
            step(model, opt, loss_of(x, vectors(4)[1]))
    assert same(*models)


class InPlaceResidual(Residual):
    """The sum and the activation in place: the state that the layers have read is overwritten."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        y = self.b(self.a(x).tanh_())
        y += x
        return self.last(y.relu_())


class OutOfPlaceResidual(Residual):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.last(torch.relu(x + self.b(torch.tanh(self.a(x)))))


@pytest.mark.parametrize("value", ["outer", "batch"])
def test_in_place_residual_sum_equals_out_of_place(value: str) -> None:
    torch.manual_seed(1)
    a = InPlaceResidual()
    torch.manual_seed(1)
    b = OutOfPlaceResidual()
    for model in (a, b):
        opt = DDPNOpt(model, lr=0.5, value=value)
        for _ in range(3):
            step(model, opt, loss_of(*vectors()))
    assert distance(a, b) < 1e-12


def error_of_step(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> str:
    """What one step says in its error, of torch or ours; nothing if it goes through."""
    try:
        step(model, DDPNOpt(model, lr=0.5, value="outer"), loss)
    except (RuntimeError, ValueError) as error:
        return str(error).replace("inplace", "in place")
    return ""


def test_an_input_overwritten_after_its_layer_has_read_it_is_never_taken_for_the_old_one() -> None:
    class Overwriting(nn.Module):
        def __init__(self, in_place: bool) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.a, self.b, self.c, self.in_place = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 3), in_place

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            y = self.b(x)
            x = x.mul_(2) if self.in_place else x * 2
            return self.c(torch.tanh(y + x))

    expected, model = Overwriting(False), Overwriting(True)
    step(expected, DDPNOpt(expected, lr=0.5, value="outer"), loss_of(*vectors()))
    error = error_of_step(model, loss_of(*vectors()))
    assert "in place" in error or (not error and distance(model, expected) < 1e-12)


def test_a_model_that_changes_its_own_input_is_never_replayed_on_the_changed_one() -> None:
    class Shifting(nn.Module):
        def __init__(self, in_place: bool) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.net, self.in_place = fcn(), in_place

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x.sub_(0.5) if self.in_place else x - 0.5)

    expected, model = Shifting(False), Shifting(True)
    x, y = vectors()
    step(expected, DDPNOpt(expected, lr=0.5, value="outer"), loss_of(x.clone(), y))
    error = error_of_step(model, loss_of(x.clone(), y))
    assert "in place" in error or (not error and distance(model, expected) < 1e-12)


def test_a_layer_that_the_second_pass_does_not_reach_is_not_skipped_in_silence() -> None:
    class Depth(nn.Module):
        """Stochastic depth with Python's own random numbers."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.a(x))
            if random.random() < 0.5:
                x = x + torch.tanh(self.b(x))
            return self.c(x)

    model = Depth()
    before = weights(model.b)
    random.seed(1)  # 0.13, 0.85, 0.76: layer b runs in the first pass only, if Python's stream is left alone
    error = error_of_step(model, loss_of(*vectors()))
    assert "'b'" in error or not any(map(torch.equal, before, model.b.parameters()))


# -- graphs ------------------------------------------------------------------------------------------------------------


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


# -- layers ------------------------------------------------------------------------------------------------------------

CONVOLUTIONS: dict[str, Callable[[], nn.Module]] = {
    "1d": lambda: nn.Conv1d(2, 4, 3),
    "1d stride padding": lambda: nn.Conv1d(2, 4, 3, stride=2, padding=2),
    "1d same": lambda: nn.Conv1d(2, 4, 4, padding="same"),
    "2d": lambda: nn.Conv2d(2, 4, 3),
    "2d stride": lambda: nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=(0, 1)),
    "2d same, even kernel": lambda: nn.Conv2d(2, 4, (2, 4), padding="same"),
    "2d valid": lambda: nn.Conv2d(2, 4, 2, padding="valid"),
    "2d reflect": lambda: nn.Conv2d(2, 4, 3, padding=(1, 2), padding_mode="reflect"),
    "2d circular": lambda: nn.Conv2d(2, 4, 3, padding=(2, 1), padding_mode="circular"),
    "2d replicate, same": lambda: nn.Conv2d(2, 4, (2, 3), padding="same", padding_mode="replicate"),
    "2d dilation": lambda: nn.Conv2d(2, 4, 2, dilation=(2, 3), padding=1),
    "2d groups": lambda: nn.Conv2d(2, 4, 3, groups=2),
    "2d depthwise, no bias": lambda: nn.Conv2d(2, 6, 3, groups=2, bias=False),
    "3d": lambda: nn.Conv3d(2, 2, 2, stride=2, padding=1),
    "3d circular": lambda: nn.Conv3d(2, 2, (1, 2, 3), padding=(0, 1, 1), padding_mode="circular", bias=False),
    "linear on tokens": lambda: nn.Linear(5, 4),
    "linear on tokens, no bias": lambda: nn.Linear(5, 40, bias=False),
    "linear on two dimensions of tokens": lambda: nn.Linear(5, 4),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("first", [True, False], ids=["first layer", "second layer"])
def test_every_kind_of_layer_gets_the_reference_step(name: str, first: bool) -> None:
    layer = CONVOLUTIONS[name]()
    dims = {"1": 1, "2": 2, "3": 3}.get(name[0], 0)
    shape = (2, *[5] * dims) if dims else (2, 3, 5) if "two" in name else (3, 5)
    x, y = torch.randn(3, *shape), torch.tensor([0, 2, 1])
    if first:
        body: list[nn.Module] = [layer]
    elif dims:
        body = [type(layer)(2, 2, 1), nn.Tanh(), layer]  # type: ignore[call-arg]
    else:
        body = [nn.Linear(5, 5), nn.Tanh(), layer]
    out = nn.Sequential(*body)(x)[0].numel()
    model = nn.Sequential(*body, nn.Tanh(), nn.Flatten(), nn.Linear(out, 3))
    a, b = twins(model)
    before = weights(model)
    step(a, DDPNOpt(a, lr=0.7, value="outer"), loss_of(x, y))
    outer_step(b, loss_of(x, y), 0.7, chain=True)
    assert distance(a, b) < 1e-12
    assert distance(a, before) > 1e-4


# -- precision ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["outer", "batch", "full"])
@pytest.mark.parametrize("curvature", ["identity", "adam", "kfac"])
def test_training_under_autocast_lowers_the_loss(value: str, curvature: str) -> None:
    torch.manual_seed(1)
    model = fcn().float()
    x, y = vectors(32)
    x = x.float()
    lr = {"identity": 0.5, "adam": 0.02, "kfac": 0.05}[curvature]
    opt = DDPNOpt(model, lr=lr, value=value, curvature=curvature)
    losses = []
    for _ in range(15):
        opt.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0]
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_a_checkpointed_block_equals_a_plain_one() -> None:
    from torch.utils.checkpoint import checkpoint

    class Block(nn.Module):
        def __init__(self, recompute: bool) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.a, self.b, self.recompute = nn.Linear(5, 6), nn.Sequential(nn.Tanh(), nn.Linear(6, 4)), recompute
            self.c = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            x = checkpoint(self.b, x, use_reentrant=False) if self.recompute else self.b(x)
            return self.c(torch.tanh(x))

    models = Block(True), Block(False)
    for model in models:
        opt = DDPNOpt(model, lr=0.5, value="outer")
        for _ in range(2):
            step(model, opt, loss_of(*vectors()))
    assert distance(*models) < 1e-12


@pytest.mark.parametrize("value", ["outer", "batch", "full"])
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_autocast_goes_through_norms_and_pooling_between_layers(precision: str, value: str) -> None:
    model = nn.Sequential(
        nn.Conv1d(1, 2, 2), nn.AvgPool1d(2), nn.Conv1d(2, 2, 1), nn.LayerNorm((2, 2), elementwise_affine=False),
        nn.Flatten(), nn.Linear(4, 3),
    ).float()  # fmt: skip
    x, y = vectors(16)
    opt = DDPNOpt(model, lr=0.1, value=value)
    losses = []
    for _ in range(10):
        opt.zero_grad()
        with torch.autocast("cpu", getattr(torch, precision)):
            loss = F.cross_entropy(model(x[:, None].float()).float(), y)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


# -- found by random networks ------------------------------------------------------------------------------------------


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
