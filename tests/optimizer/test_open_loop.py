"""Parameters without feedback are updated as by the base optimizer, and the user is told which, once."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from optimizer_networks import distance, train, twins, vectors, weights
from torch import Tensor, nn

from ddpnopt import DDPNOpt, OpenLoopWarning
from ddpnopt.trace import loose

QUIET = pytest.mark.filterwarnings("ignore::ddpnopt.OpenLoopWarning")


@pytest.fixture(autouse=True)
def _explicit_gradients_are_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters that belong to no layer are left to the base optimizer, as large ones are."""
    monkeypatch.setattr(loose, "LARGEST", 0)


class OwnNorm(nn.LayerNorm):
    """A forward of its own: what it does with its parameters is not known."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)


class OtherModules(nn.Sequential):
    open_loop = ("1.weight", "3.weight", "3.bias")

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 6), nn.PReLU(6), nn.Linear(6, 4), OwnNorm(4), nn.Tanh(), nn.Linear(4, 3))


class Words(nn.Module):
    """An embedding of integers derived from the inputs, its gradient scaled, and a bare parameter."""

    open_loop = ("embedding.weight", "scale")

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.scale = nn.Embedding(4, 5, scale_grad_by_freq=True), nn.Parameter(torch.rand(5) + 0.5)
        self.a, self.b = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.embedding((x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long())
        return self.b(torch.tanh(self.a(x * self.scale)))


class Tied(nn.Module):
    """Two modules, one weight; their biases are their own."""

    open_loop = ("b.weight", "b.bias", "c.bias")

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.c.weight = self.b.weight

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.b(torch.tanh(self.a(x))))
        return self.d(torch.tanh(self.c(x)))


class ByFunction(nn.Module):
    """A layer that is never called, its weights used through F.linear."""

    open_loop = ("b.weight", "b.bias")

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(torch.tanh(self.a(x)), self.b.weight, self.b.bias)
        return self.c(torch.tanh(x))


class HalfFrozen(nn.Sequential):
    open_loop = ("2.bias",)

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
        self[2].weight.requires_grad_(False)


class Attention(nn.Module):
    """A transformer's block: the attention's own weights are used by a function, the others by layers."""

    open_loop = (
        "block.self_attn.in_proj_weight", "block.self_attn.in_proj_bias", "block.self_attn.out_proj.weight",
        "block.self_attn.out_proj.bias",
    )  # fmt: skip
    without_factors = ("block.norm1.weight", "block.norm1.bias", "block.norm2.weight", "block.norm2.bias")

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(1, 4)
        self.block = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True, dropout=0.0)
        self.block.self_attn.add_zero_attn = True  # an option that the pieces of attention do not have
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.block(self.into(x[:, :, None])).mean(1))


class Parametrised(nn.Sequential):
    """Weight normalisation, a transposed convolution, a subclass of nn.Linear with a forward of its own."""

    open_loop = (
        "0.bias", "0.parametrizations.weight.original0", "0.parametrizations.weight.original1", "3.weight", "3.bias",
        "6.weight", "6.bias",
    )  # fmt: skip

    def __init__(self) -> None:
        class Scaled(nn.Linear):
            def forward(self, input: Tensor) -> Tensor:
                return 0.5 * super().forward(input)

        super().__init__(
            nn.utils.parametrizations.weight_norm(nn.Linear(5, 4)), nn.Tanh(), nn.Unflatten(1, (2, 2)),
            nn.ConvTranspose1d(2, 2, 2), nn.Flatten(), nn.Tanh(), Scaled(6, 4), nn.Tanh(), nn.Linear(4, 3),
        )  # fmt: skip


MODELS: list[Any] = [OtherModules, Words, Tied, ByFunction, HalfFrozen, Attention, Parametrised]
BASES: dict[str, tuple[dict[str, Any], Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": ({"lr": 0.1}, lambda p: torch.optim.SGD(p, 0.1)),
    "sgd, momentum, decay": (
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    ),
    "rmsprop": ({"lr": 0.01, "curvature": "rmsprop"}, lambda p: torch.optim.RMSprop(p, 0.01)),
    "adam": (
        {"lr": 0.01, "curvature": "adam", "weight_decay": 0.01},
        lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.01),
    ),
    "kfac": ({"lr": 0.1, "curvature": "kfac"}, lambda p: torch.optim.SGD(p, 0.1)),
    "ekfac": ({"lr": 0.1, "curvature": "ekfac"}, lambda p: torch.optim.SGD(p, 0.1)),
}


@QUIET
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("value", ["outer"])
def test_a_step_without_feedback_is_that_of_the_base_optimizer(model: Any, base: str, value: str) -> None:
    net = model()
    for p in net.parameters():  # no symmetry, no zero to start from
        if p.requires_grad:
            p.data.add_(0.1 * torch.randn_like(p))
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    a, b = twins(net)
    options, reference = BASES[base]
    opt = DDPNOpt(a, value=value, **options)
    train(a, opt, vectors, 1)
    train(b, reference([p for p in b.parameters() if p.requires_grad]), vectors, 1)
    ours, theirs = dict(a.named_parameters()), dict(b.named_parameters())
    open_loop = {*model.open_loop, *(getattr(model, "without_factors", ()) if base in ("kfac", "ekfac") else ())}
    assert set(opt.report.open_loop) == open_loop
    for name in open_loop:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-12, atol=1e-13)
        assert not torch.equal(ours[name], before[name])


@QUIET
@pytest.mark.parametrize("model", MODELS)
def test_state_of_the_base_optimizer_goes_on_from_step_to_step(model: Any) -> None:
    """With the layers' own learning rate zero, the parameters without feedback see the same gradients all along."""
    a, b = twins(model())

    def groups(net: nn.Module) -> list[dict[str, Any]]:
        named = [(n, p) for n, p in net.named_parameters() if p.requires_grad]
        return [
            {"params": [p for n, p in named if n in model.open_loop]},
            {"params": [p for n, p in named if n not in model.open_loop], "lr": 0.0},
        ]

    train(a, DDPNOpt(a, 0.05, curvature="adam", params=groups(a), value="outer"), vectors, 5)
    train(b, torch.optim.Adam(groups(b), 0.05), vectors, 5)
    assert distance(a, b) < 1e-10


@pytest.mark.parametrize("model", MODELS)
def test_the_user_is_told_once_by_name(model: Any) -> None:
    net = model()
    opt = DDPNOpt(net, lr=0.05, value="outer")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        train(net, opt, vectors, 5)
    about = [w for w in told if issubclass(w.category, OpenLoopWarning)]
    assert len(about) == 1
    message = str(about[0].message)
    assert all(name in message for name in model.open_loop)
    others = {n for n, p in net.named_parameters() if p.requires_grad} - set(model.open_loop)
    named = set(message.split("feedback: ")[1].split(". ")[0].split(", "))
    assert not named & others


def test_the_warning_points_at_the_users_line() -> None:
    net = OtherModules()
    opt = DDPNOpt(net, lr=0.05, value="outer")
    x, y = vectors()
    F.cross_entropy(net(x), y).backward()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        opt.step()
    assert [w.filename for w in told] == [__file__]


def test_nothing_is_told_where_every_parameter_has_feedback_or_none_was_asked_for() -> None:
    net, other = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 3)), OtherModules()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(net, DDPNOpt(net, lr=0.05, value="outer"), vectors, 2)
        train(other, DDPNOpt(other, lr=0.05, feedback=False), vectors, 2)


@QUIET
def test_an_excluded_layer_is_updated_as_by_the_base_optimizer() -> None:
    a, b = twins(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)))
    opt = DDPNOpt(a, lr=0.3, exclude=["2"], value="outer")
    train(a, opt, vectors, 1)
    train(b, torch.optim.SGD(b.parameters(), 0.3), vectors, 1)
    assert distance(a[2], b[2]) < 1e-14
    assert distance(a[0], b[0]) > 1e-6  # which has feedback, and a guard
    assert opt.report.open_loop == ["2.weight", "2.bias"]


@QUIET
def test_excluding_a_block_excludes_the_layers_in_it() -> None:
    net = nn.Sequential(nn.Sequential(nn.Linear(5, 4), nn.Tanh()), nn.Linear(4, 3))
    opt = DDPNOpt(net, lr=0.3, exclude=["0"], value="outer")
    train(net, opt, vectors, 1)
    assert opt.report.open_loop == ["0.0.weight", "0.0.bias"]


# -- no gradient is lost -----------------------------------------------------------------------------------------------


class Autoencoder(nn.Module):
    """The decoder is the encoder's weight, transposed, through a function."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.middle, self.classify = nn.Linear(5, 4), nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.encode(x))
        h = torch.tanh(self.middle(F.linear(h, self.encode.weight.T)))
        return self.classify(h)


@QUIET
@pytest.mark.parametrize("model", [*MODELS, Autoencoder])
@pytest.mark.parametrize("value", ["outer"])
@pytest.mark.parametrize("terminal", ["gn", "sqrt"])
def test_small_steps_follow_the_whole_gradient(model: Any, value: str, terminal: str) -> None:
    net = model()
    before = weights(net)
    x, y = vectors()
    twin = copy.deepcopy(net)
    F.cross_entropy(twin(x), y).backward()
    lr = 1e-7
    train(net, DDPNOpt(net, lr=lr, value=value, terminal=terminal), vectors, 1)
    for old, new, p in zip(before, net.parameters(), twin.parameters(), strict=True):
        gradient = torch.zeros_like(p) if p.grad is None else p.grad
        torch.testing.assert_close((old - new.detach()) / lr, gradient, rtol=1e-4, atol=1e-6)


@QUIET
@pytest.mark.parametrize(
    ("value", "terminal"),
    [
        ("full", "gn"),
        ("full", "cross_entropy"),
        ("batch", "cross_entropy"),
        ("batch", "gn"),
        ("outer", "gn"),
        ("outer", lambda z: torch.softmax(z, 1)),
    ],
    ids=["full, gn", "full, exact", "batch, exact", "batch, gn", "outer, gn", "outer, callable"],
)
@pytest.mark.parametrize("closed_loop", [True, False])
def test_curvature_is_that_of_the_pass_and_not_of_norms_already_updated(
    closed_loop: bool, value: str, terminal: Any
) -> None:
    """A norm behind the last layer cannot change what the layers before it do in the same step."""
    net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3), OwnNorm(3))
    results = []
    for lr in (0.0, 0.2):
        model = copy.deepcopy(net)
        layers = [*model[0].parameters(), *model[2].parameters()]
        groups = [{"params": layers}, {"params": model[3].parameters(), "lr": lr}]
        opt = DDPNOpt(model, 0.3, params=groups, value=value, terminal=terminal, closed_loop=closed_loop)
        train(model, opt, vectors, 1)
        results.append([p.detach() for p in layers])
    assert distance(*results) < 1e-12


def test_beside_the_batch_form_parameters_without_feedback_go_by_adam_at_its_own_rate() -> None:
    net = OtherModules()
    with pytest.warns(OpenLoopWarning):
        train(net, DDPNOpt(net, lr=3.0), vectors, 1)
    before = [p.detach().clone() for p in net.parameters()]
    opt = DDPNOpt(net, lr=3.0, open_loop_lr=1e-4)
    with pytest.warns(OpenLoopWarning, match=r"1\.weight"):
        train(net, opt, vectors, 1)
    moved = {n: float((p.detach() - q).abs().max()) for (n, p), q in zip(net.named_parameters(), before, strict=True)}
    for name in opt.report.open_loop:  # Adam's first step is its rate, whatever the gradient
        assert moved[name] == pytest.approx(1e-4, rel=1e-3)
