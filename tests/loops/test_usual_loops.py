"""What people's training code is made of: attention, shared weights, compiled and checkpointed models, averages, …"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from optimizer_networks import distance, fcn, same, train, twins, vectors, weights
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.checkpoint import checkpoint

from ddpnopt import DDPNOpt, ModelError, OpenLoopWarning

Loss = Callable[[], Tensor]


def steps(opt: DDPNOpt, loss: Loss, n: int = 8) -> list[float]:
    found = []
    for _ in range(n):
        opt.zero_grad()
        value = loss()
        value.backward()
        opt.step()
        found.append(value.item())
    return found


# -- attention, shared weights, recurrence -----------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 3)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.last((h + self.attend(h, h, h)[0]).mean(1))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 3)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.encoder(self.first(x)).mean(1))


@pytest.mark.parametrize("value", ["batch", "outer"])
@pytest.mark.parametrize(("make", "name"), [(Attention, "attend"), (Encoder, "encoder.self_attn")])
def test_attention_has_feedback_in_all_its_projections(make: Callable[[], nn.Module], name: str, value: str) -> None:
    model = make()
    before = dict(zip(dict(model.named_parameters()), weights(model), strict=True))
    x, y = torch.randn(6, 4, 5), torch.tensor([0, 1, 2, 0, 1, 2])
    opt = DDPNOpt(model, value=value, lr=3.0 if value == "batch" else 0.3)
    found = steps(opt, lambda: F.cross_entropy(model(x), y))
    assert opt.report.open_loop == []
    assert f"{name}.in_proj_weight" in before
    assert found[-1] < 0.9 * found[0]
    assert all(not torch.equal(p, before[n]) for n, p in model.named_parameters())


class Tied(nn.Module):
    """A language model whose output layer has the embedding's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden, self.out = nn.Embedding(7, 5), nn.Linear(5, 5), nn.Linear(5, 7, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(torch.tanh(self.hidden(self.embed(tokens))))


def test_tied_weights_have_feedback() -> None:
    model = Tied()
    tokens, y = torch.tensor([[0, 1], [2, 3], [4, 5]]), torch.tensor([[1, 2], [3, 4], [5, 6]])
    opt = DDPNOpt(model)
    found = steps(opt, lambda: F.cross_entropy(model(tokens).flatten(0, 1), y.flatten()))
    assert opt.report.open_loop == []
    assert model.out.weight is model.embed.weight
    assert found[-1] < 0.9 * found[0]


def test_a_recurrent_network_has_feedback_in_all_its_weights() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.out = nn.LSTM(5, 6, batch_first=True), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.lstm(x)[0][:, -1])

    model = Recurrent()
    x, y = torch.randn(6, 4, 5), torch.tensor([0, 1, 2, 0, 1, 2])
    opt = DDPNOpt(model)
    found = steps(opt, lambda: F.cross_entropy(model(x), y))
    assert opt.report.open_loop == []
    assert found[-1] < 0.9 * found[0]


def test_a_layer_used_again_and_again_has_feedback_and_trains() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.again, self.out = nn.Linear(5, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = torch.tanh(self.again(x))
            return self.out(x)

    model = Loop()
    opt = DDPNOpt(model)
    found = steps(opt, lambda: F.cross_entropy(model(vectors()[0]), vectors()[1]), 40)
    assert opt.report.open_loop == []
    assert found[-1] < 0.5 * found[0]


@pytest.mark.filterwarnings("ignore::ddpnopt.OpenLoopWarning")
@pytest.mark.parametrize("value", ["batch", "outer"])
def test_several_inputs_and_outputs_with_an_embedding(value: str) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.a, self.b = nn.Embedding(4, 6), nn.Linear(5, 6), nn.Linear(6, 6)
            self.label, self.number = nn.Linear(6, 3), nn.Linear(6, 1)

        def forward(self, x: Tensor, *, kind: Tensor) -> dict[str, Tensor]:
            h = torch.tanh(self.b(torch.tanh(self.a(x) + self.embed(kind))))
            return {"label": self.label(h), "number": self.number(h)}

    model = Both()
    x, y = vectors()
    kind, target = y % 2, x.sum(1, keepdim=True)

    def loss() -> Tensor:
        out = model(x, kind=kind)
        return F.cross_entropy(out["label"], y) + F.mse_loss(out["number"], target)

    found = steps(DDPNOpt(model, value=value, lr=3.0 if value == "batch" else 0.1), loss, 15)
    assert found[-1] < 0.9 * found[0]


def test_a_model_on_two_devices_is_refused_with_both_names() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3, device="meta"))
    with pytest.raises(ModelError, match=r"more than one device.*'0\.weight' on cpu.*'1\.weight' on meta"):
        DDPNOpt(model)


# -- compiled, checkpointed, functional --------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["model", "compiled"])
def test_a_compiled_model_takes_the_same_steps(given: str) -> None:
    torch._dynamo.reset()
    a, b = twins(fcn())
    train(a, DDPNOpt(a), vectors, 2)
    compiled = torch.compile(
        b, backend="aot_eager"
    )  # all of the compiler but the last part, which needs a C++ compiler
    train(compiled, DDPNOpt(b if given == "model" else compiled), vectors, 2)  # type: ignore[arg-type]
    assert distance(a, b) < 1e-9


class Block(nn.Module):
    def __init__(self, how: bool | None) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 6), nn.Sequential(nn.Tanh(), nn.Linear(6, 4))
        self.c, self.how = nn.Linear(4, 3), how

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h = self.b(h) if self.how is None else checkpoint(self.b, h, use_reentrant=self.how)
        return self.c(torch.tanh(h))


@pytest.mark.parametrize("value", ["batch", "outer"])
def test_activation_checkpointing_takes_the_same_steps(value: str) -> None:
    a, b = Block(None), Block(False)
    b.load_state_dict(a.state_dict())
    for model in (a, b):
        train(model, DDPNOpt(model, lr=0.5, value=value), vectors, 2)
    assert distance(a, b) < 1e-12


def test_the_full_form_on_a_checkpointed_layer_names_it_and_a_way_out() -> None:
    model = Block(False)
    with pytest.raises(ModelError, match=r"activation checkpointing.*'b\.1'.*'batch'"):
        train(model, DDPNOpt(model, lr=0.5, value="full"), vectors, 1)


def test_layers_in_the_older_form_of_checkpointing_are_trained_by_the_base_optimizer_and_named() -> None:
    """It runs its block without gradients first, where nothing can be captured."""
    a, b = Block(None), Block(True)
    b.load_state_dict(a.state_dict())
    x, y = vectors()
    x.requires_grad_()
    opt = DDPNOpt(b, value="outer", lr=1e-6)
    with pytest.warns(OpenLoopWarning, match=r"b\.1\.weight"):
        steps(opt, lambda: F.cross_entropy(b(x), y), 1)
    expected = torch.autograd.grad(F.cross_entropy(a(x), y), list(a.parameters()))
    moved = [(q.detach() - p.detach()) / -1e-6 for p, q in zip(a.parameters(), b.parameters(), strict=True)]
    assert max(float((m - g).abs().max()) for m, g in zip(moved, expected, strict=True)) < 1e-4


def test_torch_func_on_the_same_model_gives_its_own_gradients_and_leaves_the_step_alone() -> None:
    a, b = twins(fcn())
    train(a, DDPNOpt(a), vectors, 2)
    opt = DDPNOpt(b)
    for seed in range(2):
        x, y = vectors(seed=seed)
        opt.zero_grad()
        F.cross_entropy(b(x), y).backward()
        own = {name: p.detach() for name, p in b.named_parameters()}

        def loss(p: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(functional_call(b, p, (x[None],)), y[None])

        each = vmap(grad(loss), in_dims=(None, 0, 0))(own, x, y)
        plain = copy.deepcopy(b)  # has no live hooks
        whole = torch.autograd.grad(F.cross_entropy(plain(x), y), list(plain.parameters()))
        assert all(torch.allclose(e.mean(0), g) for e, g in zip(each.values(), whole, strict=True))
        other = {name: (2 * p).requires_grad_() for name, p in own.items()}
        F.cross_entropy(functional_call(b, other, (x,)), y).backward()  # a pass of other weights is no micro-batch
        assert all(p.grad is not None for p in other.values())
        opt.step()
    assert same(a, b)


# -- schedulers, averages, determinism ---------------------------------------------------------------------------------

SCHEDULES: dict[str, Callable[[DDPNOpt], Any]] = {
    "LambdaLR": lambda opt: lr_scheduler.LambdaLR(opt, lambda k: 0.9**k),
    "MultiplicativeLR": lambda opt: lr_scheduler.MultiplicativeLR(opt, lambda k: 0.9),
    "StepLR": lambda opt: lr_scheduler.StepLR(opt, 2, 0.5),
    "MultiStepLR": lambda opt: lr_scheduler.MultiStepLR(opt, [1, 3], 0.5),
    "ConstantLR": lambda opt: lr_scheduler.ConstantLR(opt, 0.5, 3),
    "LinearLR": lambda opt: lr_scheduler.LinearLR(opt, 0.1, total_iters=4),
    "ExponentialLR": lambda opt: lr_scheduler.ExponentialLR(opt, 0.9),
    "PolynomialLR": lambda opt: lr_scheduler.PolynomialLR(opt, 6),
    "CosineAnnealingLR": lambda opt: lr_scheduler.CosineAnnealingLR(opt, 5),
    "CosineAnnealingWarmRestarts": lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, 2),
    "CyclicLR": lambda opt: lr_scheduler.CyclicLR(opt, 0.1, 0.5, 2),
    "OneCycleLR": lambda opt: lr_scheduler.OneCycleLR(opt, 0.5, total_steps=8),
    "SequentialLR": lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.ConstantLR(opt, 0.5, 2), lr_scheduler.ExponentialLR(opt, 0.9)], [2]
    ),
    "ChainedScheduler": lambda opt: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(opt, 0.5, 2), lr_scheduler.ExponentialLR(opt, 0.9)]
    ),
    "ReduceLROnPlateau": lambda opt: lr_scheduler.ReduceLROnPlateau(opt, patience=0, factor=0.5),
    "SWALR": lambda opt: SWALR(opt, 0.05, 3),
}


def test_every_scheduler_of_torch_is_tried_here() -> None:
    known = {
        name
        for name, kind in vars(lr_scheduler).items()
        if isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler) and not name.startswith("_")
    }
    assert known - {"LRScheduler"} <= set(SCHEDULES)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_scheduler_sets_the_learning_rate_of_each_step(name: str) -> None:
    a, b = twins(fcn())
    opt, by_hand = (DDPNOpt(model, lr=0.3, value="outer", momentum=0.5) for model in (a, b))
    schedule = SCHEDULES[name](opt)
    used = set()
    for k in range(5):
        for option in ("lr", "momentum"):
            by_hand.param_groups[0][option] = opt.param_groups[0][option]
        used.add(float(opt.param_groups[0]["lr"]))
        for model, optimizer in ((a, opt), (b, by_hand)):
            train(model, optimizer, vectors, 1)
        schedule.step(*([float(k)] if name == "ReduceLROnPlateau" else []))
    assert len(used) > 1
    assert same(a, b)


@pytest.mark.parametrize("ema", [True, False])
def test_averaged_weights_are_the_average_and_their_norms_are_updated(ema: bool) -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6, affine=False), nn.Tanh(), nn.Linear(6, 3))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5) if ema else None)
    opt = DDPNOpt(model)
    history = []
    for seed in range(3):
        x, y = vectors(seed=seed)
        steps(opt, lambda x=x, y=y: F.cross_entropy(model(x), y), 1)  # type: ignore[misc]
        average.update_parameters(model)
        history.append(weights(model))
    first, second, third = history
    for k, p in enumerate(average.module.parameters()):
        expected = (first[k] + second[k]) / 4 + third[k] / 2 if ema else (first[k] + second[k] + third[k]) / 3
        assert torch.allclose(p, expected)
    update_bn([vectors(seed=seed)[0] for seed in range(3)], average)
    assert not torch.equal(average.module[1].running_mean, model[1].running_mean)
    assert opt.report.step == 3


@pytest.mark.parametrize("value", ["batch", "outer", "full"])
def test_two_runs_are_the_same_bit_for_bit(value: str) -> None:
    def run() -> list[Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.3), nn.Tanh(), nn.Linear(6, 3))
        train(model, DDPNOpt(model, lr=0.3, value=value), vectors, 3)
        return weights(model)

    torch.use_deterministic_algorithms(True)
    try:
        assert same(run(), run())
    finally:
        torch.use_deterministic_algorithms(False)
