"""Several forward passes before one backward pass are one step of all of them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt import DDPNOpt


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv1d(1, 4, 2), nn.BatchNorm1d(4), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3))


class Mixed(nn.Module):
    """A bare parameter, attention to a query of its own, and a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(4))
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)
        self.recur, self.out = nn.GRU(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.shift
        x = x + self.attend(x[:, :1], x, x)[0]
        return self.out(self.recur(x)[0][:, -1])  # type: ignore[no-any-return]


class Inside(nn.Module):
    """All passes inside one model."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, *xs: Tensor) -> list[Tensor]:
        return [self.net(x) for x in xs]


def triplet(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return ((a - b).square().sum(1) - (a - c).square().sum(1) + 4).clamp_min(0).mean()


def assert_same(a: nn.Module, b: nn.Module) -> None:
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-8, atol=1e-10)


SHAPES = {dense: (6, 5), convolutional: (6, 1, 5), Mixed: (6, 3, 4)}


@pytest.mark.parametrize("make", SHAPES)
@pytest.mark.parametrize("value", ["batch", "outer"])
def test_three_passes_of_a_model_equal_one_pass_of_a_model_that_runs_it_three_times(
    make: Callable[[], nn.Module], value: str
) -> None:
    outside = make()
    inside = Inside(copy.deepcopy(outside))
    options = {"value": value} if value == "batch" else {"value": value, "lr": 0.1}
    opt_outside, opt_inside = DDPNOpt(outside, **options), DDPNOpt(inside, **options)  # type: ignore[arg-type]
    for _ in range(3):
        xs = [torch.randn(*SHAPES[make]) for _ in range(3)]
        for opt, run in ((opt_outside, lambda *xs: [outside(x) for x in xs]), (opt_inside, inside)):
            opt.zero_grad()
            loss = triplet(*run(*xs))
            loss.backward()
            opt.step(loss=loss)
    assert opt_outside.report.open_loop == []
    assert_same(outside, inside.net)


def test_a_recurrent_state_that_goes_from_pass_to_pass_equals_a_loop_inside_the_model() -> None:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.out = nn.Linear(9, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.tanh(self.mix(torch.cat([x, h], 1)))
            return self.out(h), h

    class Loop(nn.Module):
        def __init__(self, cell: Cell) -> None:
            super().__init__()
            self.cell = cell

        def forward(self, x: Tensor) -> list[Tensor]:
            return run(self.cell, x)

    def run(cell: Cell, x: Tensor) -> list[Tensor]:
        h, found = torch.zeros(len(x), 4), []
        for part in x.unbind(1):
            z, h = cell(part, h)
            found.append(z)
        return found

    cell = Cell()
    loop = Loop(copy.deepcopy(cell))
    opts = DDPNOpt(cell), DDPNOpt(loop)
    for _ in range(3):
        x, y = torch.randn(6, 4, 5), torch.randint(3, (6,))
        for opt, call in ((opts[0], lambda x: run(cell, x)), (opts[1], loop)):
            opt.zero_grad()
            sum(F.cross_entropy(z, y) for z in call(x)).backward()  # type: ignore[union-attr]
            opt.step()
    assert_same(cell, loop.cell)


def test_passes_of_unequal_size_have_the_gradient_of_both() -> None:
    model = dense()
    opt = DDPNOpt(model, lr=1e-3, value="outer", closed_loop=False)
    twin = copy.deepcopy(model)
    a, b = torch.randn(4, 5), torch.randn(7, 5)
    (model(a).square().mean() + model(b).sin().mean()).backward()
    opt.step()
    (twin(a).square().mean() + twin(b).sin().mean()).backward()
    change = torch.cat([(p - q).flatten() for p, q in zip(model.parameters(), twin.parameters(), strict=True)])
    gradient = torch.cat([p.grad.flatten() for p in twin.parameters() if p.grad is not None])
    assert F.cosine_similarity(change, -gradient, dim=0) > 0.999


def test_passes_through_different_heads_make_one_step_of_all_layers() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.a, self.b = nn.Linear(5, 6), nn.Linear(6, 3), nn.Linear(6, 2)

        def forward(self, x: Tensor, head: str) -> Tensor:
            out: Tensor = getattr(self, head)(torch.tanh(self.body(x)))
            return out

    model = Heads()
    opt = DDPNOpt(model)
    before = [p.clone() for p in model.parameters()]
    x = torch.randn(8, 5)
    (
        F.cross_entropy(model(x, "a"), torch.randint(3, (8,))) + F.cross_entropy(model(x, "b"), torch.randint(2, (8,)))
    ).backward()
    opt.step()
    assert opt.report.open_loop == []
    assert not any(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("batched", [True, False])
def test_passes_of_single_samples_stay_samples_of_a_batch_when_they_are_fitted(batched: bool) -> None:
    torch.manual_seed(0)
    model, twin = dense(), dense()
    twin.load_state_dict(model.state_dict())
    x, y = torch.randn(6, 5), torch.arange(6) % 3
    one, whole = DDPNOpt(model), DDPNOpt(twin)
    for step in range(60):
        for opt in (one, whole):
            opt.zero_grad()
        singles = zip(x, y, strict=True)
        sum(
            F.cross_entropy(model(a[None] if batched else a), b[None] if batched else b) / 6 for a, b in singles
        ).backward()  # type: ignore[union-attr]
        F.cross_entropy(twin(x), y).backward()
        one.step()
        whole.step()
        assert one.report.loss == "cross_entropy", step
        if step < 3:
            torch.testing.assert_close(list(model.parameters()), list(twin.parameters()), rtol=1e-3, atol=1e-4)
    assert F.cross_entropy(model(x), y).item() < 0.01


def test_a_single_observation_without_a_batch_dimension_is_a_batch_of_one() -> None:
    class Convolves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.out = nn.Conv1d(1, 4, 2), nn.LayerNorm(16), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.out(self.norm(torch.tanh(self.conv(x)).flatten(-2)))
            return found

    torch.manual_seed(0)
    model = Convolves()
    twin = copy.deepcopy(model)
    for each, batched in ((model, False), (twin, True)):
        opt = DDPNOpt(each)
        for seed in range(5):
            x = torch.randn(1, 5, generator=torch.Generator().manual_seed(seed))
            opt.zero_grad()
            z = each(x[None])[0] if batched else each(x)
            (-torch.log_softmax(z, 0)[seed % 3]).backward()
            opt.step()
        assert opt.report.open_loop == []
    torch.testing.assert_close(list(model.parameters()), list(twin.parameters()))
