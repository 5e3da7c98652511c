"""Parameters that belong to no layer: bare, shared, parametrised, or in modules that hooks know nothing of."""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from loose_networks import CLASSES, MODELS, B, MaskedConvolution, N, Parametrised, Scales, Tokens, data
from torch import Tensor, nn

import ddpnopt.ddp.value.damping
from ddpnopt import DDPNOpt, OpenLoopWarning
from ddpnopt.linear.given import Given
from ddpnopt.trace import loose

tight = {"rtol": 1e-9, "atol": 1e-12}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)


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


def test_a_model_of_loose_parameters_alone_is_trained_with_feedback() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(MaskedConvolution(1, 4, 3, padding=1), nn.ReLU(), MaskedConvolution(4, 1, 3, padding=1))
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


@pytest.mark.parametrize("kind", ["tensor", "channel", "observed"])
def test_quantised_weights_have_the_gradients_of_autograd(kind: str) -> None:
    class Quantised(nn.Linear):
        def __init__(self) -> None:
            super().__init__(N, N)
            on, zero = torch.ones(1, dtype=torch.int64), torch.zeros(N, dtype=torch.int32)
            self.scale, self.zero, self.on = nn.Buffer(torch.full((N,), 0.05)), nn.Buffer(zero), nn.Buffer(on)
            self.low, self.high = nn.Buffer(torch.full((N,), -0.3)), nn.Buffer(torch.full((N,), 0.3))

        def forward(self, x: Tensor) -> Tensor:
            w = self.weight
            if kind == "tensor":
                w = torch.fake_quantize_per_tensor_affine(w, 0.05, 0, -8, 7)
            elif kind == "channel":
                w = torch.fake_quantize_per_channel_affine(w, self.scale, self.zero, 0, -8, 7)
            else:
                w = torch.fused_moving_avg_obs_fake_quant(
                    w, self.on, self.on, self.low, self.high, self.scale, self.zero, 0.0, -8, 7, 0, True, True
                )
            return F.linear(x, w, self.bias)

    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(N, N), nn.Tanh(), Quantised(), nn.Tanh(), nn.Linear(N, CLASSES))
    x, y = torch.randn(2 * N, N), torch.arange(2 * N) % CLASSES  # the weight has half as many rows as there are samples
    wanted = one_by_one(model, x, y)
    opt = DDPNOpt(model)
    F.cross_entropy(model(x), y).backward()
    (recording,) = opt._capture.arrivals.take_all()
    found = {r.name.removesuffix(".weight"): r.p_h for r in recording.layers if isinstance(r.layer, Given)}
    assert set(found) == {"2", "2.bias"}
    for name, p in found.items():
        torch.testing.assert_close(p, wanted[name], rtol=1e-4, atol=1e-6)


def test_a_bias_beside_a_weight_that_cannot_be_followed_takes_part() -> None:
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, w: Tensor) -> Tensor:
            return w.sign()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
            return g

    class Signs(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, Own.apply(self.weight), self.bias)

    model = nn.Sequential(Signs(N, 2 * B), nn.Tanh(), nn.Linear(2 * B, CLASSES))
    x, y = torch.randn(B, N), torch.arange(B) % CLASSES
    opt = DDPNOpt(model)
    F.cross_entropy(model(x), y).backward()
    with pytest.warns(OpenLoopWarning, match=r"0\.weight\. "):
        opt.step()
    assert opt.report.open_loop == ["0.weight"]
