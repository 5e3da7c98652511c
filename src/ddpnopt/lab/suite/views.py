"""Vectors learned from agreement: two views of a picture, and ratings of items by users."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt.lab.suite.data import digits, generator, split
from ddpnopt.lab.suite.measures import error_of_mean
from ddpnopt.lab.suite.task import Batch, Setup, Splits, suite_task


def view(x: Tensor) -> Tensor:
    """Each picture shifted by up to one pixel, brighter or darker, with noise."""
    padded = F.pad(x, (1, 1, 1, 1))
    moved = [padded[:, :, top : top + 8, left : left + 8] for top in range(3) for left in range(3)]
    shifted = torch.stack(moved, 1)[torch.arange(len(x)), torch.randint(9, (len(x),))]
    return shifted * (0.7 + 0.6 * torch.rand(len(x), 1, 1, 1)) + 0.15 * torch.randn_like(x)


@suite_task("embeddings", "accuracy %", "higher", steps=300, batch_size=64)
def two_views() -> Setup:
    """Two views of a digit are to be nearer than those of the 63 others (SimCLR); measured among the held-out ones."""

    def codes(model: nn.Module, data: Batch) -> Tensor:
        return F.normalize(model(torch.cat([view(data[0]), view(data[0])])), dim=1)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        code = codes(model, batch)
        similarity = (code @ code.T / 0.2).masked_fill(torch.eye(len(code), dtype=torch.bool), -torch.inf)
        return F.cross_entropy(similarity, torch.arange(len(code)).roll(len(code) // 2))

    def found(model: nn.Module, data: Batch) -> float:
        first, second = codes(model, data).chunk(2)
        return 100 * ((first @ second.T).argmax(1) == torch.arange(len(first))).double().mean().item()

    def pictures(data: Batch) -> Batch:
        return (data[0][:, None],)

    parts = digits()
    splits = Splits(pictures(parts.train), pictures(parts.validation), pictures(parts.test))
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 16, 64),
        nn.ReLU(),
        nn.Linear(64, 16),
    )
    return Setup(model, splits, loss, found, chance=100 / len(splits.test[0]))


class Taste(nn.Module):
    """A rating: the product of two vectors, and how generous the user and how good the item is."""

    def __init__(self, users: int, items: int, width: int = 8) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(users, width), nn.Embedding(items, width)
        self.generous, self.good = nn.Embedding(users, 1), nn.Embedding(items, 1)
        for table in (self.users, self.items, self.generous, self.good):
            nn.init.normal_(table.weight, std=0.2)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        product = (self.users(user) * self.items(item)).sum(1)
        return product + self.generous(user)[:, 0] + self.good(item)[:, 0]


@suite_task("embeddings", "squared error", "lower", steps=600, batch_size=128)
def recommendations() -> Setup:
    """A fifth of the ratings that 300 users would give to 200 items, some items rated far more often than others."""
    users, items, number = 300, 200, 15000
    source = generator(96)
    tastes, kinds = torch.randn(users, 3, generator=source), torch.randn(items, 3, generator=source)
    full = tastes @ kinds.T / 1.7 + 0.7 * torch.randn(users, 1, generator=source) + torch.randn(items, generator=source)
    often = (1 / torch.arange(1.0, items + 1) ** 0.5).repeat(users)
    pairs = torch.multinomial(often, number, generator=source)
    rating = full.flatten()[pairs] + 0.3 * torch.randn(number, generator=source)
    splits = split((pairs // items, pairs % items, rating), 1000, 2000)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        user, item, wanted = batch
        return F.mse_loss(model(user, item), wanted)

    chance = error_of_mean(splits.train[2], splits.test[2])
    return Setup(Taste(users, items), splits, loss, lambda net, data: loss(net, data).item(), chance)


TASKS = (two_views, recommendations)
