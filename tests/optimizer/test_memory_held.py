"""Nothing of a pass outlives its last use, without waiting for Python's collector of cycles."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from ddpnopt import DDPNOpt

Training = tuple[nn.Module, Callable[[], Tensor]]
"""A model and its loss on a new batch."""


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    gc.enable()


class UNet(nn.Module):
    """Features of the way down are joined on the way up, behind transposed convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 3, 3, padding=1)
        self.lift2, self.up2 = nn.ConvTranspose2d(3, 2, 2, 2), nn.Conv2d(5, 2, 3, padding=1)
        self.lift1, self.up1 = nn.ConvTranspose2d(2, 2, 2, 2), nn.Conv2d(4, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.relu(self.down1(x))
        second = torch.relu(self.down2(F.max_pool2d(first, 2)))
        h = torch.relu(self.up2(torch.cat([self.lift2(F.max_pool2d(second, 2)), second], 1)))
        found: Tensor = self.up1(torch.cat([self.lift1(h), first], 1))
        return found


class Residual(nn.Module):
    """A block with batch norm around an identity."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.norm = nn.Conv2d(1, 3, 3), nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.scale, self.out = nn.Parameter(torch.ones(3, 1, 1)), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x + self.scale * torch.relu(self.norm(self.inner(x)))
        found: Tensor = self.out(x.mean((2, 3)))
        return found


class Cell(nn.Module):
    """One layer for all times."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.cell, self.out = nn.Parameter(torch.zeros(1, 4)), nn.Linear(7, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.start.expand(len(x), -1)
        for t in range(x.shape[1]):
            h = torch.tanh(self.cell(torch.cat([x[:, t], h], 1)))
        found: Tensor = self.out(h)
        return found


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.core, self.out = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.core(x)[0][:, -1])
        return found


class Transformer(nn.Module):
    """A class token, a table of positions, and a head that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(7, 4), nn.Embedding(6, 4)
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.out = nn.Linear(4, 7, bias=False)
        self.out.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = torch.cat([self.token.expand(len(ids), -1, -1), self.words(ids)], 1)
        h = h + self.places(torch.arange(h.shape[1]))
        found: Tensor = self.out(self.layer(h)[:, 0])
        return found


def unet() -> Training:
    model = UNet()
    return model, lambda: model(torch.randn(5, 1, 4, 4)).square().mean()


def classifier(model: nn.Module, *shape: int) -> Training:
    return model, lambda: F.cross_entropy(model(torch.randn(5, *shape)), torch.randint(3, (5,)))


def residual() -> Training:
    return classifier(Residual(), 1, 6, 6)


def cell_in_a_loop() -> Training:
    return classifier(Cell(), 4, 3)


def recurrent_layer() -> Training:
    return classifier(Recurrent(), 4, 3)


def weight_normed() -> Training:
    return classifier(nn.Sequential(weight_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3)), 4)


def transformer_with_tied_head() -> Training:
    model = Transformer()
    return model, lambda: F.cross_entropy(model(torch.randint(7, (5, 4))), torch.randint(7, (5,)))


def two_passes() -> Training:
    model = nn.Sequential(nn.Linear(4, 5), nn.PReLU(), nn.Linear(5, 3))
    return model, lambda: (model(torch.randn(5, 4)) - model(torch.randn(5, 4))).square().sum(1).mean()


def derivative_in_the_loss() -> Training:
    model = nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, 1))

    def loss() -> Tensor:
        x = torch.rand(6, 1, requires_grad=True)
        u = model(x)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return (slope + u).square().mean()

    return model, loss


def derivative_by_the_inputs_alone() -> Training:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))

    def loss() -> Tensor:
        x, y = torch.randn(5, 4, requires_grad=True), torch.randint(3, (5,))
        (slope,) = torch.autograd.grad(F.cross_entropy(model(x), y), x)
        return F.cross_entropy(model(x.detach() + 0.1 * slope.sign()), y)

    return model, loss


def pass_without_a_backward_pass() -> Training:
    model, loss = unet()

    def twice() -> Tensor:
        model(torch.randn(3, 1, 4, 4))
        return loss()

    return model, twice


TRAININGS = (
    unet, residual, cell_in_a_loop, recurrent_layer, weight_normed, transformer_with_tied_head, two_passes,
    derivative_in_the_loss, derivative_by_the_inputs_alone, pass_without_a_backward_pass,
)  # fmt: skip


def live_tensors() -> int:
    return sum(issubclass(type(each), Tensor) for each in gc.get_objects())


@pytest.mark.filterwarnings("ignore::ddpnopt.OpenLoopWarning", "ignore::ddpnopt.errors.UncertainLossWarning")
@pytest.mark.parametrize("make", TRAININGS, ids=lambda make: make.__name__)
def test_steps_leave_no_tensors_behind_even_without_the_collector(make: Callable[[], Training]) -> None:
    model, loss = make()
    opt = DDPNOpt(model)

    def train(steps: int) -> None:
        for _ in range(steps):
            opt.zero_grad()
            loss().backward()
            opt.step()

    train(5)
    gc.collect()
    gc.disable()
    before = live_tensors()
    train(4)
    assert live_tensors() <= before
