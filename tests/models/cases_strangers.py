"""Less common models and loops: parameters of other kinds, gradients from elsewhere, layers for some samples."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from data import split, tokens, vectors
from torch import Tensor, nn
from trial import Trial, case

STRANGERS = "less common models and loops"


def mlp(inputs: int = 10, outputs: int = 4, width: int = 32) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs)
    )


class SparseWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(40, 32, sparse=True), nn.Linear(32, 3)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.out(self.words(ids).mean(1))
        return found


@case("an embedding with sparse gradients", STRANGERS)
def sparse() -> Trial:
    model = SparseWords()
    ids = tokens(64, 8)
    trial = Trial(model, lambda x, y: F.cross_entropy(model(x), y), split(16, ids, ids[:, 0] % 3))

    def step(trial: Trial, opt: torch.optim.Optimizer, batch: tuple[Any, ...]) -> None:
        opt.zero_grad()
        trial.loss(*batch).backward()
        if isinstance(opt, torch.optim.AdamW):  # which does not take them
            for p in model.parameters():
                assert p.grad is not None
                p.grad = p.grad.to_dense()
        opt.step()

    trial.step = step
    return trial


class Spectral(nn.Module):
    """A convolution by a complex weight in the frequency domain."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.skip, self.out = nn.Conv1d(1, 8, 1), nn.Conv1d(8, 8, 1), nn.Conv1d(8, 1, 1)
        self.weight = nn.Parameter(0.1 * torch.randn(8, 8, 6, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        f = torch.fft.rfft(h)
        low = torch.einsum("bix,iox->box", f[:, :, :6], self.weight)
        smooth = torch.fft.irfft(F.pad(low, (0, f.shape[-1] - 6)), n=x.shape[-1])
        found: Tensor = self.out(F.gelu(smooth + self.skip(h)))
        return found


@case("a complex weight between Fourier transforms", STRANGERS)
def spectral() -> Trial:
    model = Spectral()
    x = torch.randn(64, 1, 32)
    return Trial(model, lambda x, t: F.mse_loss(model(x), t), split(16, x, F.avg_pool1d(x, 5, 1, 2)))


class Experts(nn.Module):
    """Each sample runs through the expert that it is sent to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.out = nn.Linear(10, 16), nn.Linear(16, 3), nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu()
        share, chosen = self.gate(h).softmax(-1).max(-1)
        mixed = torch.zeros_like(h)
        for k, expert in enumerate(self.experts):
            here = (chosen == k).nonzero()[:, 0]
            if len(here):
                mixed = mixed.index_add(0, here, expert(h[here]) * share[here, None])
        found: Tensor = self.out(mixed)
        return found


@case("experts that see the samples sent to them", STRANGERS)
def experts() -> Trial:
    model = Experts()
    return Trial(model, lambda x, y: F.cross_entropy(model(x), y), split(16, *vectors()))


@case("two losses, each with its own backward()", STRANGERS)
def two_backward_passes() -> Trial:
    model = mlp()

    def step(trial: Trial, opt: torch.optim.Optimizer, batch: tuple[Any, ...]) -> None:
        x, y = batch
        opt.zero_grad()
        z = model(x)
        F.cross_entropy(z, y).backward(retain_graph=True)
        (0.01 * z.square().mean()).backward()
        opt.step()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        z = model(x)
        return F.cross_entropy(z, y) + 0.01 * z.square().mean()

    return Trial(model, loss, split(16, *vectors()), step)


@case("tasks weighted by the norms of their gradients", STRANGERS, options={"weight_grads": True})
def gradient_norms() -> Trial:
    model = mlp(outputs=5)
    x, y = vectors()

    def losses(x: Tensor, y: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        z = model(x)
        return F.cross_entropy(z[:, :4], y), F.mse_loss(z[:, 4:], t)

    def step(trial: Trial, opt: torch.optim.Optimizer, batch: tuple[Any, ...]) -> None:
        both = losses(*batch)
        norms = [torch.autograd.grad(each, model[2].weight, retain_graph=True)[0].norm() for each in both]
        opt.zero_grad()
        (both[0] + (norms[0] / (norms[1] + 1e-6)).clamp(0.1, 10) * both[1]).backward()
        opt.step()

    return Trial(model, lambda *batch: sum(losses(*batch), torch.zeros(())), split(16, x, y, x[:, :1].sin()), step)


@case("MAML, one inner step", STRANGERS, options={"weight_grads": True}, steps=60)
def maml() -> Trial:
    model = mlp(1, 1)
    x = 4 * torch.rand(8, 20, 1) - 2
    y = torch.sin(x + 3 * torch.rand(8, 1, 1))
    call = torch.func.functional_call

    def loss(x: Tensor, y: Tensor) -> Tensor:
        total = torch.zeros(())
        for a, b in zip(x, y, strict=True):
            weights = dict(model.named_parameters())
            inner = F.mse_loss(call(model, weights, (a[:10],)), b[:10])
            grads = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
            new = {name: w - 0.05 * g for (name, w), g in zip(weights.items(), grads, strict=True)}
            total = total + F.mse_loss(call(model, new, (a[10:],)), b[10:])
        return total / len(x)

    return Trial(model, loss, split(4, x, y))


@case("layers called one by one, not the model", STRANGERS)
def one_by_one() -> Trial:
    model = mlp()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        for layer in model:
            x = layer(x)
        return F.cross_entropy(x, y)

    return Trial(model, loss, split(16, *vectors()))


@case("targets of size 1e4", STRANGERS, steps=80)
def large_targets() -> Trial:
    model = mlp(5, 1)
    x = torch.randn(64, 5)
    return Trial(model, lambda x, t: F.mse_loss(model(x), t), split(16, x, 1e4 * x[:, :1].sin() + 5e4))


class Activations(nn.Module):
    """Keeps its activations for a penalty that the loss adds."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(10, 32), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.first = torch.relu(self.a(x))
        self.second = torch.relu(self.b(self.first))
        found: Tensor = self.out(self.second)
        return found


@case("penalties on activations inside the model", STRANGERS)
def penalised_activations() -> Trial:
    model = Activations()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y) + 5 * model.first.abs().mean() + 5 * model.second.square().mean()

    return Trial(model, loss, split(16, *vectors()))


class Neighbours(nn.Module):
    """A graph as a matrix, its nodes as samples."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(10, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor, matrix: Tensor) -> Tensor:
        found: Tensor = matrix @ self.b(torch.relu(matrix @ self.a(x)))
        return found


@case("a graph as a dense matrix, half of the nodes with labels", STRANGERS, steps=60)
def dense_graph() -> Trial:
    model = Neighbours()
    x, y = vectors()
    matrix = ((y[:, None] == y) & (torch.rand(len(y), len(y)) < 0.2)).float() + torch.eye(len(y))
    matrix = matrix / matrix.sum(1, keepdim=True)
    half = len(y) // 2
    return Trial(model, lambda x, y, m: F.cross_entropy(model(x, m)[:half], y[:half]), [(x, y, matrix)])
