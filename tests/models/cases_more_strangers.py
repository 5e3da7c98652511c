"""Models whose weights meet the samples in unusual ways, and loops over single samples."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from data import split, tokens, vectors
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from trial import Trial, case

MORE = "weights that meet the samples in unusual ways"


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(40, 24), nn.Linear(48, 40)
        self.recur = nn.LSTM(24, 24, batch_first=True, bidirectional=True)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.words(ids), lengths, batch_first=True, enforce_sorted=False)
        h, _ = pad_packed_sequence(self.recur(packed)[0], batch_first=True, total_length=ids.shape[1])
        found: Tensor = self.out(h)
        return found


@case("packed sequences in a bidirectional LSTM", MORE, steps=60)
def packed() -> Trial:
    model = Tagger()
    ids, lengths = tokens(48, 13), torch.randint(4, 13, (48,))

    def loss(ids: Tensor, lengths: Tensor) -> Tensor:
        inside = torch.arange(12)[None] < lengths[:, None]
        return F.cross_entropy(model(ids[:, :-1], lengths)[inside], ids[:, 1:][inside])

    return Trial(model, loss, split(16, ids, lengths))


class StackedExperts(nn.Module):
    """The weights of all experts are one parameter, multiplied experts first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.out = nn.Linear(10, 16), nn.Linear(16, 5), nn.Linear(16, 4)
        self.up, self.down = nn.Parameter(torch.randn(5, 16, 32) / 4), nn.Parameter(torch.randn(5, 32, 16) / 6)
        self.shift = nn.Parameter(torch.zeros(5, 32))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu()
        inner = torch.bmm(h.expand(5, -1, -1), self.up) + self.shift[:, None]
        each = torch.bmm(inner.relu(), self.down)
        found: Tensor = self.out(h + torch.einsum("bk,kbd->bd", self.gate(h).softmax(-1), each))
        return found


@case("experts as one parameter", MORE)
def stacked_experts() -> Trial:
    model = StackedExperts()
    return Trial(model, lambda x, y: F.cross_entropy(model(x), y), split(16, *vectors()))


class OneWeightPerTask(nn.Module):
    """A hypernetwork makes one weight for the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.task, self.make, self.out = nn.Parameter(torch.randn(3, 6)), nn.Linear(6, 160), nn.Linear(16, 4)

    def forward(self, x: Tensor, task: int) -> Tensor:
        found: Tensor = self.out(F.linear(x, self.make(self.task[task]).view(16, 10)).relu())
        return found


@case("a hypernetwork, one weight for all samples", MORE)
def generated() -> Trial:
    model = OneWeightPerTask()
    batches = [(*batch, k % 3) for k, batch in enumerate(split(16, *vectors()))]
    return Trial(model, lambda x, y, task: F.cross_entropy(model(x, task), y), batches)


class Operator(nn.Module):
    """The values of functions at the same points: a network of the function and one of the points."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(20, 48), nn.Tanh(), nn.Linear(48, 24))
        self.trunk = nn.Sequential(nn.Linear(1, 48), nn.Tanh(), nn.Linear(48, 24))

    def forward(self, u: Tensor, points: Tensor) -> Tensor:
        return torch.einsum("bi,pi->bp", self.branch(u), self.trunk(points))


@case("DeepONet, integrals of functions", MORE, steps=80)
def operator() -> Trial:
    model = Operator()
    waves = torch.arange(1, 4) * 3.1416
    a, x, points = torch.randn(64, 3), torch.linspace(0, 1, 20), torch.rand(11, 1)
    u = a @ torch.sin(waves[:, None] * x)
    t = a @ ((1 - torch.cos(waves[:, None] * points.T)) / waves[:, None])
    return Trial(model, lambda u, t: F.mse_loss(model(u, points), t), split(16, u, t))


class FixedPoint(nn.Module):
    """Differentiated implicitly, by a hook that solves for the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.cell, self.out = nn.Linear(10, 24), nn.Linear(24, 24), nn.Linear(24, 4)
        nn.init.normal_(self.cell.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        u = self.into(x)
        with torch.no_grad():
            z = torch.zeros_like(u)
            for _ in range(15):
                z = torch.tanh(self.cell(z) + u)
        z = torch.tanh(self.cell(z) + u)
        if z.requires_grad:
            start = z.detach().requires_grad_()
            again = torch.tanh(self.cell(start) + u.detach())

            def solve(grad: Tensor) -> Tensor:
                found = grad
                for _ in range(10):
                    found = torch.autograd.grad(again, start, found, retain_graph=True)[0] + grad
                return found

            z.register_hook(solve)
        found: Tensor = self.out(z)
        return found


@case("deep equilibrium", MORE, steps=60)
def equilibrium() -> Trial:
    model = FixedPoint()
    return Trial(model, lambda x, y: F.cross_entropy(model(x), y), split(16, *vectors()))


@case("single samples without a batch dimension, one backward()", MORE)
def single_samples() -> Trial:
    model = nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 4))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return torch.stack([F.cross_entropy(model(a), b) for a, b in zip(x, y, strict=True)]).mean()

    return Trial(model, loss, split(8, *vectors()))


@case("Jacobians by torch.func in the loss", MORE, steps=60)
def jacobians() -> Trial:
    model = nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))
    x = torch.randn(48, 2)
    value = torch.sin(x[:, 0]) * x[:, 1]
    slope = torch.stack([torch.cos(x[:, 0]) * x[:, 1], torch.sin(x[:, 0])], 1)

    def loss(x: Tensor, value: Tensor, slope: Tensor) -> Tensor:
        weights: Any = dict(model.named_parameters())
        one = torch.func.jacrev(lambda v: torch.func.functional_call(model, weights, (v[None],)).squeeze())
        return F.mse_loss(model(x).squeeze(1), value) + F.mse_loss(torch.func.vmap(one)(x), slope)

    return Trial(model, loss, split(16, x, value, slope))
