"""Whole steps of `DDPNOpt(model)` against dense matrices: embeddings, norms, attention, tied and reused weights."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from dense_step import Control, DenseStep
from torch import Tensor, nn

from ddpnopt import DDPNOpt

B, N, WORDS, CLASSES = 5, 4, 7, 3


class Places(nn.Module):
    """A table that is added: its parameter belongs to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, N))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table


class Attention(nn.Module):
    """A block of a transformer between an embedding and a head, which may have its weight."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, N), Places()
        self.first, self.second = nn.LayerNorm(N), nn.LayerNorm(N)
        self.query, self.key, self.value, self.mix = (nn.Linear(N, N) for _ in range(4))
        self.wide, self.narrow = nn.Linear(N, 6), nn.Linear(6, N)
        self.head = nn.Linear(N, WORDS, bias=not tied)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.places(self.words(ids))
        h = self.first(x)
        weight = (self.query(h) @ self.key(h).mT / N**0.5).softmax(-1)
        x = x + self.mix(weight @ self.value(h))
        x = x + self.narrow(torch.tanh(self.wide(self.second(x))))
        found: Tensor = self.head(x.mean(1))
        return found


class Cell(nn.Module):
    """One layer, and one norm, at all times, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.cell, self.norm, self.out = (
            nn.Linear(3, N),
            nn.Linear(N, N),
            nn.LayerNorm(N),
            nn.Linear(N, WORDS),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(len(x), N)
        for t in range(x.shape[1]):
            h = torch.tanh(self.norm(self.cell(h) + self.into(x[:, t])))
        found: Tensor = self.out(h)
        return found


class Pictures(nn.Module):
    """Convolutions, one of them around a skip connection, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, N, 3, padding=1), nn.Conv2d(N, N, (2, 3), padding=(0, 1), bias=False)
        self.point, self.head = nn.Conv2d(N, 3, 1), nn.Linear(3 * 20, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        h = h[:, :, 1:] + torch.tanh(self.second(h))
        found: Tensor = self.head(torch.tanh(self.point(h)).flatten(1))
        return found


def pictures() -> Tensor:
    return torch.randn(B, 2, 5, 5)


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, N, 3, padding=1), nn.Tanh(), nn.Conv2d(N, 3, 2), nn.Flatten(), nn.Linear(48, WORDS)
    )


def ids() -> Tensor:
    return torch.randint(0, WORDS, (B, 4))


def series() -> Tensor:
    return torch.randn(B, 3, 3)


def chain() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(WORDS, N), nn.Linear(N, 3), nn.LayerNorm(3), nn.Tanh(), nn.Flatten(), nn.Linear(12, WORDS)
    )


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "a chain of embedding, layers and norm": (chain, ids),
    "attention": (lambda: Attention(tied=False), ids),
    "attention, tied embeddings": (lambda: Attention(tied=True), ids),
    "a recurrent cell": (Cell, series),
    "a chain of convolutions": (convolutions, pictures),
    "convolutions and a skip connection": (Pictures, pictures),
}


def controls(model: nn.Module) -> list[Control]:
    """In the order of first use."""
    if isinstance(model, Cell):
        modules: list[nn.Module] = [model.cell, model.into, model.norm, model.out]
    elif isinstance(model, Attention):
        modules = [model.words, model.places, model.first, model.query, model.key, model.value, model.mix]
        modules += [model.second, model.wide, model.narrow]
        modules += [] if model.head.weight is model.words.weight else [model.head]
    else:
        modules = [m for m in model.children() if list(m.parameters())]
    tied = isinstance(model, Attention) and model.head.weight is model.words.weight
    return [
        Control(m, list(m.parameters()), loose=isinstance(m, Places) or (tied and isinstance(m, nn.Embedding)))
        for m in modules
    ]


@pytest.mark.parametrize("name", NETWORKS)
def test_three_steps_equal_those_of_dense_matrices(name: str) -> None:
    make, inputs = NETWORKS[name]
    model = make()
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)  # no symmetry
    wanted = copy.deepcopy(model)
    start = copy.deepcopy(model)
    dense = DenseStep(wanted, controls(wanted), chain=isinstance(model, nn.Sequential))
    opt = DDPNOpt(model)
    for _ in range(3):
        x, y = inputs(), torch.randint(0, WORDS, (B,))
        memory = opt._length.memory
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
        assert opt.report.open_loop == []
        assert not opt.report.undone
        assert opt.report.fraction is not None
        dense.step(x, lambda z, y=y: F.cross_entropy(z, y, reduction="none") / B, opt.report.fraction, memory)
        for (parameter, p), q in zip(model.named_parameters(), wanted.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-9, msg=lambda m, n=parameter: f"{n}: {m}")
    assert memory > 0  # the prior has taken part
    for (parameter, p), old in zip(model.named_parameters(), start.parameters(), strict=True):
        # the bias of the keys adds the same to all arguments of a softmax
        assert float((p - old).detach().abs().max()) > 1e-5 or parameter == "key.bias"
