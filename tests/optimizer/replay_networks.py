"""Networks whose forward pass is replayed: random, branching, with several inputs or outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from optimizer_networks import Residual, fcn, vectors
from torch import Tensor, nn

from ddpnopt import DDPNOpt


class Dropouts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 8), nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(torch.tanh(self.a(x)), 0.4, self.training)
        return self.c(F.dropout(torch.relu(self.b(x)), 0.3, self.training))


class BatchNorms(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(8, 6),
            nn.BatchNorm1d(6, momentum=None), nn.Tanh(), nn.Linear(6, 3),
        )  # fmt: skip


class Branches(nn.Module):
    """Two branches, one deeper than the other, concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left = nn.Linear(5, 4), nn.Linear(4, 3)
        self.right, self.deeper, self.head = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.softplus(self.stem(x))
        left, right = torch.tanh(self.left(x)), torch.tanh(self.deeper(torch.tanh(self.right(x))))
        return self.head(torch.cat([left, right], 1))


class OtherOrder(nn.Module):
    """Layers defined last to first."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.b, self.a = nn.Linear(4, 3), nn.Linear(6, 4), nn.Linear(5, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


class TwoInputs(nn.Module):
    """Positional and keyword inputs, one of them optional and not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 4), nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, scale: float = 1.0, *, extra: Tensor) -> Tensor:
        return self.c(torch.tanh(self.a(x)) * scale + torch.tanh(self.b(extra)))


class Heads(nn.Module):
    """Two outputs in a dict, beside one that is not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.one, self.two = nn.Linear(5, 4), nn.Linear(4, 3), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> dict[str, Any]:
        x = torch.tanh(self.trunk(x))
        return {"one": self.one(x), "two": {"inner": (self.two(x),)}, "name": "heads", "nothing": None}


class Tokens(nn.Module):
    """Linear on (B, tokens, n), with a residual sum and a mean over the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(x))
        x = x + torch.tanh(self.b(x))
        return self.c(x.mean(1))


def loss_of(x: Tensor, y: Tensor) -> Callable[[nn.Module], Tensor]:
    return lambda model: F.cross_entropy(model(x), y)


def two_inputs_loss(model: nn.Module) -> Tensor:
    x, y = vectors()
    return F.cross_entropy(model(x, scale=0.7, extra=vectors(inputs=3, seed=5)[0]), y)


def heads_loss(model: nn.Module) -> Tensor:
    x, y = vectors()
    out = model(x)
    return F.cross_entropy(out["one"], y) + F.mse_loss(out["two"]["inner"][0], x[:, :2])


TOKENS = torch.randn(8, 4, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
CASES: dict[str, tuple[type[nn.Module], Callable[[nn.Module], Tensor], bool]] = {
    "fcn": (fcn, loss_of(*vectors()), True),
    "dropout": (Dropouts, loss_of(*vectors()), True),
    "batch norm": (BatchNorms, loss_of(*vectors()), True),
    "residual": (Residual, loss_of(*vectors()), False),
    "branches": (Branches, loss_of(*vectors()), False),
    "other order": (OtherOrder, loss_of(*vectors()), True),
    "two inputs": (TwoInputs, two_inputs_loss, False),
    "heads": (Heads, heads_loss, False),
    "tokens": (Tokens, loss_of(TOKENS, vectors()[1]), False),
}
EACH = pytest.mark.parametrize("case", CASES)


def make(case: str) -> tuple[nn.Module, Callable[[nn.Module], Tensor], bool]:
    build, loss, chain = CASES[case]
    return build(), loss, chain


def step(model: nn.Module, opt: DDPNOpt, loss: Callable[[nn.Module], Tensor]) -> None:
    opt.zero_grad()
    loss(model).backward()
    opt.step()
