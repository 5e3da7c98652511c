"""Weights of layers that the model also reads itself: every use of them counts, for each sample."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt import DDPNOpt, OpenLoopWarning
from ddpnopt.linear.given import Given

B = 6


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)


class TiedByHand(nn.Module):
    """Words in, words out, and one table for both."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mix = nn.Embedding(7, 4), nn.Linear(4, 4)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = torch.tanh(self.mix(self.words(ids))) @ self.words.weight.T
        return found


class TiedAutoencoder(nn.Module):
    """The decoder is the transposed encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.shift = nn.Linear(7, 3), nn.Parameter(torch.zeros(7))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.code(x)), self.code.weight.t(), self.shift)


class DeepTiedAutoencoder(nn.Module):
    """Bare shifts beside weights that have as many rows as there are samples, or several times as many."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(7, 2 * B), nn.Linear(2 * B, B)
        self.c, self.d = nn.Parameter(torch.zeros(2 * B)), nn.Parameter(torch.zeros(7))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.b(torch.tanh(self.a(x))))
        return F.linear(torch.tanh(F.linear(h, self.b.weight.T, self.c)), self.a.weight.T, self.d)


class Lent(nn.Module):
    """Layers that are never called: their weights are arguments of functions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.mix, self.out = nn.Conv1d(3, 3, 2, groups=3), nn.Linear(3, 5, bias=False), nn.Linear(5, 7)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(F.conv1d(x.unflatten(1, (3, 4)), self.conv.weight, self.conv.bias, groups=3))
        found: Tensor = self.out(torch.tanh(self.mix.weight @ h).sum(2))
        return found


class Generated(nn.Module):
    """A small network makes the weight of a linear layer, and the rows that are added to all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.task, self.prompt = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(1, 2, 4))
        self.make, self.adapt, self.out = nn.Linear(3, 16), nn.Linear(4, 4), nn.Linear(4, 7)

    def forward(self, x: Tensor) -> Tensor:
        h = F.linear(x.unflatten(1, (3, 4)), torch.tanh(self.make(self.task)).view(4, 4))
        rows = torch.tanh(self.adapt(self.prompt)).expand(len(x), -1, -1)
        found: Tensor = self.out(torch.tanh(torch.cat([rows, h], 1)).sum(1) * h.mean(1))
        return found


class Trunk(nn.Module):
    """The values of all samples at the same points: a network of the points meets one of the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.branch, self.trunk, self.norm, self.last = (
            nn.Linear(12, 5), nn.Linear(2, 4), nn.LayerNorm(4), nn.Linear(4, 5),
        )  # fmt: skip
        self.register_buffer("points", torch.randn(7, 2))

    def forward(self, x: Tensor) -> Tensor:
        at_points = self.last(F.gelu(self.norm(self.trunk(self.get_buffer("points")))))
        return torch.einsum("bi,pi->bp", torch.tanh(self.branch(x)), at_points)


class Compared(nn.Module):
    """One network for the samples and for the prototypes that they are compared with."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 5), nn.Linear(5, 4)
        self.register_buffer("prototypes", torch.randn(7, 12))

    def embed(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(torch.tanh(self.first(x)))
        return found

    def forward(self, x: Tensor) -> Tensor:
        return self.embed(x) @ self.embed(self.get_buffer("prototypes")).T


def words() -> tuple[Tensor, Tensor]:
    return torch.randint(7, (B, 3)), torch.randint(7, (B, 3))


def token_loss(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z.flatten(0, -2), y.flatten())


Case = tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]], Callable[[Tensor, Tensor], Tensor]]
CASES: dict[str, Case] = {
    "tied by hand": (TiedByHand, words, token_loss),
    "tied autoencoder": (TiedAutoencoder, lambda: (torch.randn(B, 7),) * 2, F.mse_loss),
    "deep tied autoencoder": (DeepTiedAutoencoder, lambda: (torch.randn(B, 7),) * 2, F.mse_loss),
    "generated": (Generated, lambda: (torch.randn(B, 12), torch.randint(7, (B,))), F.cross_entropy),
    "trunk": (Trunk, lambda: (torch.randn(B, 12), torch.randint(7, (B,))), F.cross_entropy),
    "compared": (Compared, lambda: (torch.randn(B, 12), torch.randint(7, (B,))), F.cross_entropy),
    "lent": (Lent, lambda: (torch.randn(B, 12), torch.randint(7, (B,))), F.cross_entropy),
}
USED = {
    "tied by hand": {"words.weight"},
    "tied autoencoder": {"code.weight", "code.bias"},
    "deep tied autoencoder": {"a.weight", "a.bias", "b.weight", "b.bias", "c", "d"},
    "generated": {"task", "prompt", "make.weight", "make.bias", "adapt.weight", "adapt.bias"},
    "trunk": {"trunk.weight", "trunk.bias", "norm.weight", "norm.bias", "last.weight", "last.bias"},
    "compared": {"first.weight", "first.bias", "last.weight", "last.bias"},
    "lent": {"conv.weight", "conv.bias", "mix.weight"},
}


def take_step(opt: DDPNOpt, model: nn.Module, x: Tensor, y: Tensor, loss: Callable[[Tensor, Tensor], Tensor]) -> float:
    opt.zero_grad()
    value = loss(model(x), y)
    value.backward()
    opt.step()
    return value.item()


@pytest.mark.filterwarnings("error::ddpnopt.OpenLoopWarning")
@pytest.mark.parametrize("name", CASES)
def test_the_gradients_of_the_samples_contain_every_use(name: str) -> None:
    build, data, loss = CASES[name]
    model, (x, y) = build(), data()
    opt = DDPNOpt(model)
    for _ in range(2):  # the first finds a gradient that no layer explains, the second where it comes from
        take_step(opt, model, x, y, loss)
    parameters = dict(model.named_parameters())
    wanted: dict[str, list[Tensor]] = {each: [] for each in USED[name]}
    opt._capture.enabled = False
    for i in range(B):
        grads = torch.autograd.grad(
            loss(model(x[i : i + 1]), y[i : i + 1]) / B, [parameters[each] for each in USED[name]]
        )
        for each, grad in zip(USED[name], grads, strict=True):
            wanted[each].append(grad.flatten())
    opt._capture.enabled = True
    opt.zero_grad()
    loss(model(x), y).backward()
    (recording,) = opt._capture.arrivals.take_all()
    found = {record.name: record.p_h for record in recording.layers if isinstance(record.layer, Given)}
    assert USED[name] <= set(found)
    for each in USED[name]:
        torch.testing.assert_close(found[each], torch.stack(wanted[each]))


@pytest.mark.filterwarnings("error::ddpnopt.OpenLoopWarning")
@pytest.mark.parametrize("name", CASES)
def test_every_parameter_gets_feedback_and_training_resumes(name: str) -> None:
    build, data, loss = CASES[name]
    model, (x, y) = build(), data()
    opt = DDPNOpt(model)
    first, *_, last = [take_step(opt, model, x, y, loss) for _ in range(30)]
    assert last < 0.5 * first
    assert opt.report.open_loop == []
    again = build()
    again.load_state_dict(model.state_dict())
    resumed = DDPNOpt(again)
    resumed.load_state_dict(opt.state_dict())
    assert [take_step(resumed, again, x, y, loss) for _ in range(5)][-1] < last
    assert resumed.report.open_loop == []


def test_a_penalty_outside_the_model_leaves_the_layers_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
    opt = DDPNOpt(model)
    x, y = torch.randn(B, 7), torch.randint(3, (B,))

    def loss(z: Tensor, y: Tensor) -> Tensor:
        w = model[0].weight
        return F.cross_entropy(z, y) + 0.1 * (w @ w.T - torch.eye(5)).square().sum()

    with warnings.catch_warnings():
        warnings.simplefilter("error", OpenLoopWarning)
        losses = [take_step(opt, model, x, y, loss) for _ in range(20)]
    assert losses[-1] < losses[0]
    loss(model(x), y).backward()
    (recording,) = opt._capture.arrivals.take_all()
    assert [record.name for record in recording.layers] == ["0", "2"]
