"""Vectors without labels or ratings: two views that must agree number by number, and what people have chosen."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt.lab.suite.data import generator
from ddpnopt.lab.suite.glyphs import encoder, known_and_new, nearest_is_same
from ddpnopt.lab.suite.task import Batch, Setup, Splits, suite_task


def seen_again(x: Tensor) -> Tensor:
    """Each picture shifted by up to one pixel, stronger or weaker, with noise and a hole of 4x4."""
    size = x.shape[-1]
    padded = F.pad(x, (1, 1, 1, 1))
    moved = [padded[:, :, top : top + size, left : left + size] for top in range(3) for left in range(3)]
    shifted = torch.stack(moved, 1)[torch.arange(len(x)), torch.randint(9, (len(x),))]
    corner = torch.randint(size - 3, (len(x), 2, 1, 1))
    axis = torch.arange(size)
    down, right = axis[:, None] - corner[:, 0], axis - corner[:, 1]
    hole = ((down >= 0) & (down < 4) & (right >= 0) & (right < 4))[:, None]
    strength = 0.7 + 0.6 * torch.rand(len(x), 1, 1, 1)
    return (strength * shifted).masked_fill(hole, 0.0) + 0.2 * torch.randn_like(x)


class Twin(nn.Module):
    """A code of 32 for each picture; in training two layers with batch norm make more numbers of it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = encoder(12, 32)
        self.project = nn.Sequential(
            nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.project(self.body(x))


@suite_task("embeddings", "accuracy %", "higher", steps=300, batch_size=64, sealed=True)
def barlow_twins() -> Setup:
    """The correlations between the numbers of two views are to be one for the same number and zero for others.

    Measured on characters that were never seen: is the nearest of all the same character?
    """

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        first, second = (model(seen_again(batch[0])) for _ in range(2))
        first, second = ((z - z.mean(0)) / (z.std(0) + 1e-4) for z in (first, second))
        correlation = first.T @ second / len(first)
        wanted = torch.eye(len(correlation))
        weight = torch.where(wanted > 0, 1.0, 0.02)
        return (weight * (correlation - wanted).square()).sum()

    def measure(model: nn.Module, data: Batch) -> float:
        assert isinstance(model, Twin)
        return nearest_is_same(model.body(data[0]), data[1])

    return Setup(Twin(), known_and_new(), loss, measure, chance=100 / 30)


USERS, ITEMS = 300, 200


def choices(each: int = 24) -> Splits:
    """What 300 people have chosen among 200 things, popular ones more often: pairs, and what they chose later."""
    source = generator(186)
    taste, kind = torch.randn(USERS, 5, generator=source), torch.randn(ITEMS, 5, generator=source)
    liking = 0.9 * taste @ kind.T + torch.randn(ITEMS, generator=source)
    noise = -torch.log(-torch.log(torch.rand(USERS, ITEMS, generator=source).clamp(1e-9, 1 - 1e-7)))
    chosen = (liking + noise).topk(each, 1).indices
    chosen = chosen.gather(1, torch.rand(USERS, each, generator=source).argsort(1))
    user = torch.arange(USERS)[:, None]

    def pairs(columns: slice) -> Batch:
        part = chosen[:, columns]
        return user.expand_as(part).flatten(), part.flatten()

    return Splits(pairs(slice(12)), pairs(slice(12, 16)), pairs(slice(16, each)))


class Factors(nn.Module):
    """The product of a person's and a thing's vector, and how popular the thing is."""

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.users, self.items, self.popular = (
            nn.Embedding(USERS, width),
            nn.Embedding(ITEMS, width),
            nn.Embedding(ITEMS, 1),
        )
        nn.init.normal_(self.users.weight, std=0.1)
        nn.init.normal_(self.items.weight, std=0.1)
        nn.init.zeros_(self.popular.weight)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return (self.users(user) * self.items(item)).sum(-1) + self.popular(item)[..., 0]


@suite_task("embeddings", "AUC %", "higher", steps=500, batch_size=128, sealed=True)
def implicit_choices() -> Setup:
    """A thing that was chosen is to come before one at random (BPR); measured on later choices, against all things."""
    splits = choices()

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        user, item = batch
        other = torch.randint(ITEMS, item.shape)
        decay = sum(weight.square().sum() for weight in model.parameters())
        return -F.logsigmoid(model(user, item) - model(user, other)).mean() + 1e-4 * decay

    def measure(model: nn.Module, data: Batch) -> float:
        score = model(torch.arange(USERS)[:, None], torch.arange(ITEMS)[None])
        seen = torch.zeros(USERS, ITEMS, dtype=torch.bool)
        for part in (splits.train, data):
            seen[part] = True
        mine = score[data][:, None]
        others = score[data[0]].masked_fill(seen[data[0]], torch.nan)
        before = torch.where(others.isnan(), torch.nan, (mine > others).float())
        return 100 * before.nanmean().item()

    return Setup(Factors(), splits, loss, measure, chance=50.0)


TASKS = (barlow_twins, implicit_choices)
