"""Small networks and batches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def fcn() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4), nn.Sigmoid(), nn.Linear(4, 3))


def cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 2), nn.Tanh(), nn.Flatten(),
        nn.Linear(16, 3),
    )  # fmt: skip


class Written(nn.Module):
    """The layers of a chain called in a forward() of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x)))
        return self.head(x.view(x.size(0), -1))


class Skip(nn.Module):
    """A skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.last(x + torch.tanh(self.middle(x)))


def vectors(n: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 5), torch.randint(3, (n,))


def images(n: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 1, 6, 6), torch.randint(3, (n,))


def backward(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    opt.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss.detach()


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def assert_equal(model: nn.Module, other: nn.Module, rtol: float = 1e-12, atol: float = 1e-12) -> None:
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)
