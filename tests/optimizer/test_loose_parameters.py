"""Parameters that belong to no layer: bare, shared, parametrised, or in modules that hooks know nothing of."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import ddpnopt.ddp.value.damping
from ddpnopt import DDPNOpt, OpenLoopWarning
from ddpnopt.linear.given import Given
from ddpnopt.trace import loose

B, N, CLASSES = 5, 4, 3
tight = {"rtol": 1e-9, "atol": 1e-12}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)


class Net(nn.Module):
    """A layer, something else on (B, 6, N), and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(N, N), nn.Linear(N, CLASSES)

    def between(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(torch.tanh(self.between(self.into(x))).mean(1))
        return found


class Tokens(Net):
    """A class token and a table of positions, of which a part is used."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.table = nn.Parameter(torch.randn(1, 1, N)), nn.Parameter(torch.randn(1, 9, N))

    def between(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        return x + self.table[:, : x.shape[1]]


class Masked(Net):
    """A token in the place of others, written into what a layer has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(N))

    def between(self, x: Tensor) -> Tensor:
        x = 2 * x
        x[x.detach().sum(2) > 0] = self.token.tanh()
        return x.square()


class Heads(Net):
    """Keys of two heads, repeated for each sample: heads and samples in one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = nn.Parameter(torch.randn(2, 3, N // 2))

    def between(self, x: Tensor) -> Tensor:
        queries = x.unflatten(2, (2, -1)).transpose(1, 2).flatten(0, 1)  # (2 B, 6, N / 2)
        keys = self.keys.tanh().repeat(len(x), 1, 1)
        found = torch.bmm(torch.bmm(queries, keys.mT).softmax(-1), keys)
        return x + found.unflatten(0, (-1, 2)).transpose(1, 2).flatten(2)


class InPlace(Net):
    """A table without a dimension for the batch, added in place."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, N))

    def between(self, x: Tensor) -> Tensor:
        x = 2 * x
        x += self.table
        return x


class Scales(Net):
    """The scale of a layer, a temperature, and a shift of each place."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.temperature = nn.Parameter(torch.rand(N) + 0.5), nn.Parameter(torch.zeros(()))
        self.shift = nn.Parameter(torch.randn(6, 1))

    def between(self, x: Tensor) -> Tensor:
        return (x + self.scale * torch.sin(x)) / self.temperature.exp() + self.shift - 0.5 * self.shift


class Positions(Net):
    """Rows of positions, which all samples share."""

    def __init__(self, batched: bool) -> None:
        super().__init__()
        self.positions, self.batched = nn.Embedding(9, N), batched

    def between(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        return x * self.positions(places[None] if self.batched else places)


class OwnForwards(Net):
    """Modules with a forward of their own, and some that have no layer here."""

    def __init__(self) -> None:
        super().__init__()

        class Scaled(nn.Linear):
            def forward(self, input: Tensor) -> Tensor:
                return 0.5 * super().forward(input)

        class Transposed(nn.Module):  # as in the models of some libraries
            def __init__(self) -> None:
                super().__init__()
                self.weight, self.bias = nn.Parameter(torch.randn(N, N)), nn.Parameter(torch.randn(N))

            def forward(self, x: Tensor) -> Tensor:
                return torch.addmm(self.bias, x.reshape(-1, N), self.weight).view(x.shape)

        class OwnNorm(nn.LayerNorm):
            def forward(self, input: Tensor) -> Tensor:
                return super().forward(input)

        self.scaled, self.transposed, self.norm = Scaled(N, N), Transposed(), OwnNorm(N)
        self.act, self.up = nn.PReLU(), nn.ConvTranspose1d(N, N, 3, padding=1)

    def between(self, x: Tensor) -> Tensor:
        x = x + self.transposed(torch.tanh(self.scaled(x)))
        return self.act(self.norm(x)) + self.up(x.transpose(1, 2)).transpose(1, 2)


class Tied(nn.Module):
    """An embedding whose rows are those of the head, and the bias of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.body, self.head = nn.Embedding(7, N), nn.Linear(N, N), nn.Linear(N, 7)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.words(ids))).mean(1))


class Shared(Net):
    """One weight in two layers, and once more transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(N, N), nn.Linear(N, N)
        self.b.weight = self.a.weight

    def between(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.b(torch.tanh(self.a(x)))), self.a.weight.T)


class Parametrised(Net):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = weight_norm(nn.Linear(N, N)), spectral_norm(nn.Linear(N, N))
        self.c = weight_norm(nn.Conv1d(N, N, 3, padding=1))

    def between(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x))) + self.c(x.transpose(1, 2)).transpose(1, 2)


class Experts(Net):
    """Three experts as one parameter: all of them on all samples, experts first, or those that a sample chooses."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.weight, self.shift = nn.Parameter(torch.randn(3, N, N)), nn.Parameter(torch.randn(3, N))

    def between(self, x: Tensor) -> Tensor:
        if self.kind == "first":
            each = torch.bmm(x.sum(1).expand(3, -1, -1), self.weight) + self.shift[:, None]
            return x + torch.tanh(each).sum(0)[:, None]
        chosen = (x.detach().sum(2)[:, :2] > 0).long() + 1  # (B, 2)
        each = (x.sum(1)[:, None, None] @ self.weight[chosen]).squeeze(2) + self.shift[chosen]
        return x + torch.tanh(each).sum(1, keepdim=True)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tokens": Tokens, "in place": InPlace, "scales": Scales, "own forwards": OwnForwards, "tied": Tied,
    "shared": Shared, "parametrised": Parametrised,
    "masked": Masked, "heads": Heads,
    "experts": lambda: Experts("first"), "experts of samples": lambda: Experts("chosen"),
    "positions": lambda: Positions(False), "positions, one row": lambda: Positions(True),
}  # fmt: skip


def data(model: nn.Module, n: int = B, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    if isinstance(model, Tied):
        return torch.randint(7, (n, 6), generator=g), torch.randint(7, (n,), generator=g)
    return torch.randn(n, 6, N, generator=g), torch.randint(CLASSES, (n,), generator=g)


def one_by_one(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The gradients of the samples, each from a pass of its own."""
    found: dict[str, list[Tensor]] = {}
    for i in range(len(x)):
        twin = copy.deepcopy(model)
        (F.cross_entropy(twin(x[i : i + 1]), y[i : i + 1]) / len(x)).backward()
        for name, p in twin.named_parameters():
            found.setdefault(name.removesuffix(".weight"), []).append(p.grad.flatten())  # type: ignore[union-attr]
    return {name: torch.stack(each) for name, each in found.items()}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("retraced", [False, True])
def test_the_gradients_of_the_samples_are_those_of_single_passes(name: str, retraced: bool) -> None:
    model = MODELS[name]()
    if retraced and isinstance(model, Parametrised):
        model.b = nn.Linear(N, N)  # whose power iteration goes on in each pass
    x, y = data(model)
    wanted = one_by_one(model, x, y)
    opt = DDPNOpt(model)
    F.cross_entropy(model(x), y).backward()
    (recording,) = opt._capture.arrivals.take_all()
    if retraced:
        for record in recording.layers:
            record.free()
        opt._capture.retrace(recording)
    found = {r.name.removesuffix(".weight"): r for r in recording.layers}
    covered = {id(p) for r in recording.layers for p in r.parameters}
    assert covered == {id(p) for p in model.parameters()}
    for each, record in found.items():
        if isinstance(record.layer, Given):
            torch.testing.assert_close(record.p_h, wanted[each], **tight)


class Functional(nn.Module):
    """All weights are bare, but those of the last layer."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ((6, N), (6,), (6, 6), (6,))
        self.w, self.b, self.v, self.c = (nn.Parameter(0.5 * torch.randn(s)) for s in sizes)
        self.out = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(F.linear(x, self.w) + self.b)
        return self.out(torch.tanh(h @ self.v + self.c + h))


@pytest.mark.parametrize("closed_loop", [True, False])
@pytest.mark.parametrize("value", ["batch", "outer"])
def test_one_step_equals_the_dense_reference(value: str, closed_loop: bool) -> None:
    """Dense Q_uu of each stage, and a ledger of what the stages before it have done, to first order."""
    model, lr = Functional(), 0.5
    x, y = torch.randn(B, N), torch.arange(B) % CLASSES
    form: dict[str, Any] = {"relax": 0.3, "dof": 1.0} if value == "batch" else {"terminal": "sqrt"}
    opt = DDPNOpt(model, lr, value=value, closed_loop=closed_loop, **form)
    before = copy.deepcopy(model)
    each = one_by_one(model, x, y)
    phi = F.cross_entropy(model(x), y, reduction="none").detach() / B
    F.cross_entropy(model(x), y).backward()
    with patch.object(ddpnopt.ddp.value.damping, "FLOOR", 0.0):
        opt.step()
    assert opt.report.open_loop == []

    names = ["w", "b", "v", "c", "out"]
    P = [each[n] if n != "out" else torch.cat([each["out"], each["out.bias"]], 1) for n in names]
    v, L = torch.full((B,), 0.3 if value == "batch" else 1.0), 0.5 / phi
    steps = []
    if value == "batch":
        L = torch.diag(L)
        for p in reversed(P):
            Q_uu = torch.eye(p.shape[1]) / lr + p.T @ L @ p
            k, K = torch.linalg.solve(Q_uu, p.T @ v), torch.linalg.solve(Q_uu, p.T @ L)
            steps.insert(0, lambda c, k=k, K=K: -k - K @ c)
            v, L = v - L @ p @ k, L - L @ p @ K
    else:
        for p in reversed(P):
            s = lr * L * p.square().sum(1)
            steps.insert(0, lambda c, p=p, v=v, L=L / (1 + s): -lr * (v + L * c) @ p)
            v, L = v / (1 + s), L / (1 + s)
    c = torch.zeros(B)
    for name, p, step in zip(names, P, steps, strict=True):
        du = step(c if closed_loop else torch.zeros(B))
        c = c + p @ du
        old = [getattr(before, name)] if name != "out" else [before.out.weight, before.out.bias]
        new = [getattr(model, name)] if name != "out" else [model.out.weight, model.out.bias]
        moved = torch.cat([(a - b).detach().flatten() for a, b in zip(new, old, strict=True)])
        torch.testing.assert_close(moved, du, rtol=1e-9, atol=1e-11)


def train(model: nn.Module, opt: Any, steps: int, n: int = B) -> list[float]:
    losses = []
    for _ in range(steps):
        x, y = data(model, n)
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("options", [{}, {"curvature": "adam", "lr": 0.01}, {"terminal": "cross_entropy"}])
@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_takes_part_and_the_loss_falls(name: str, options: dict[str, Any]) -> None:
    model = MODELS[name]()
    before = copy.deepcopy(model)
    opt = DDPNOpt(model, **options)
    losses = train(model, opt, 10)
    assert opt.report.open_loop == []
    assert losses[-1] < losses[0]
    assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters(), strict=True))


@pytest.mark.parametrize("name", ["tokens", "scales", "tied", "positions", "shared"])
def test_micro_batches_are_one_batch(name: str) -> None:
    a = MODELS[name]()
    b = copy.deepcopy(a)
    x, y = data(a, 6)
    for model, parts in ((a, [slice(0, 6)]), (b, [slice(0, 4), slice(4, 6)])):
        opt = DDPNOpt(model)
        for some in parts:
            (F.cross_entropy(model(x[some]), y[some], reduction="sum") / 6).backward()
        opt.step()
        assert opt.report.open_loop == []
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-8, atol=1e-10)


def test_dropout_of_a_parameter_is_followed() -> None:
    class Dropped(Tokens):
        def between(self, x: Tensor) -> Tensor:
            return x + F.dropout(self.table.tanh(), 0.5)[:, :6] * F.dropout(self.token, 0.1)

    model = Dropped()
    x, y = data(model)
    torch.manual_seed(3)
    each = F.cross_entropy(model(x), y, reduction="none") / B
    parameters = [model.table, model.token]
    wanted = [
        torch.stack(g) for g in zip(*(torch.autograd.grad(e, parameters, retain_graph=True) for e in each), strict=True)
    ]
    opt = DDPNOpt(model)
    torch.manual_seed(3)
    F.cross_entropy(model(x), y).backward()
    (recording,) = opt._capture.arrivals.take_all()
    found = {r.name: r.p_h for r in recording.layers if isinstance(r.layer, Given)}
    for name, gradient in zip(("table", "token"), wanted, strict=True):
        torch.testing.assert_close(found[name], gradient.flatten(1), **tight)


@pytest.mark.parametrize("reason", ["too large", "unknown function", "excluded", "other dimension"])
def test_uses_that_are_not_supported_leave_a_parameter_to_the_base_optimizer(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Other(Scales):
        def between(self, x: Tensor) -> Tensor:
            if reason == "unknown function":
                return x * torch.fft.fft(self.scale).real
            if reason == "other dimension":
                return (x.transpose(0, 1) * self.scale).transpose(0, 1)
            return x * self.scale

    model = Other()
    if reason == "too large":
        monkeypatch.setattr(loose, "LARGEST", 0)
    opt = DDPNOpt(model, 0.1, value="outer", exclude=["into"] if reason == "excluded" else [])
    twin = copy.deepcopy(model)
    with pytest.warns(OpenLoopWarning, match=r"into\.weight" if reason == "excluded" else "scale"):
        train(model, opt, 1)
    x, y = data(twin)
    F.cross_entropy(twin(x), y).backward()
    torch.optim.SGD(twin.parameters(), 0.1).step()
    left = "into.weight" if reason == "excluded" else "scale"
    torch.testing.assert_close(model.get_parameter(left), twin.get_parameter(left), **tight)


def test_a_penalty_and_a_use_that_is_not_seen_still_count() -> None:
    class Hidden(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
            return g

    class Both(Scales):
        def between(self, x: Tensor) -> Tensor:
            return x * self.scale + torch.sin(x * Hidden.apply(self.scale))

    model, lr = Both(), 1e-7
    twin = copy.deepcopy(model)
    x, y = data(model)
    for net in (model, twin):
        opt = DDPNOpt(model, lr, value="outer") if net is model else torch.optim.SGD(twin.parameters(), lr)
        (F.cross_entropy(net(x), y) + net.scale.square().sum()).backward()
        opt.step()
    torch.testing.assert_close(model.scale, twin.scale, rtol=1e-12, atol=1e-12)


def test_a_model_with_compiled_parts_leaves_them_to_the_base_optimizer() -> None:
    model = Scales()
    model.into.compile(backend="eager")
    with pytest.warns(OpenLoopWarning, match="scale"):
        train(model, DDPNOpt(model), 2)


class Masked(nn.Conv2d):
    """A convolution with a forward pass of its own, as in PixelCNN."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones_like(self.weight)
        mask[:, :, 2:] = 0
        return self._conv_forward(x, self.weight * mask, self.bias)


def test_a_model_of_loose_parameters_alone_is_trained_with_feedback() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Masked(1, 4, 3, padding=1), nn.ReLU(), Masked(4, 1, 3, padding=1))
    opt = DDPNOpt(model)
    x = (torch.rand(16, 1, 6, 6) > 0.5).to(torch.get_default_dtype())
    losses = []
    for _ in range(60):
        opt.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(x), x)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    assert opt.report.open_loop == []
    assert losses[-1] < 0.2 * losses[0]
