"""Losses on pairs and triplets: encoders that run more than once per loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt.lab.suite.data import digits, flat_digits, generator
from ddpnopt.lab.suite.fully_connected import dense
from ddpnopt.lab.suite.measures import majority_accuracy
from ddpnopt.lab.suite.task import Batch, Measure, Setup, Splits, suite_task

# Each picture appears with this many others.
PARTNERS = 4


def nearest_centre(train: Batch) -> Measure:
    """Accuracy of naming the class whose mean embedding of the training data is nearest."""

    def measure(model: nn.Module, data: Batch) -> float:
        x, y = train
        codes = model(x)
        centres = torch.stack([codes[y == label].mean(0) for label in range(10)])
        found = torch.cdist(model(data[0]), centres).argmin(1)
        return 100 * (found == data[1]).double().mean().item()

    return measure


def partners(y: Tensor, same: bool, source: torch.Generator) -> Tensor:
    """For each label the index of a random row of the same class, or of another."""
    match = (y[:, None] == y[None, :]) == same
    return torch.multinomial(match.float(), 1, generator=source)[:, 0]


@suite_task("embeddings", "accuracy %", "higher", steps=300, batch_size=32)
def contrastive_pairs() -> Setup:
    """Pairs of digits to be drawn together or pushed apart; one encoder called twice."""
    splits = flat_digits(0.2)
    x, y = (tensor.repeat(PARTNERS, *[1] * (tensor.dim() - 1)) for tensor in splits.train)
    source = generator(60)
    same = torch.rand(len(y), generator=source) < 0.5
    partner = torch.where(same, partners(y, True, source), partners(y, False, source))

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        first, second, alike = batch
        distance = F.pairwise_distance(model(first), model(second))
        return torch.mean(alike * distance**2 + (1 - alike) * F.relu(1 - distance) ** 2)

    data = Splits((x, x[partner], same.float()), splits.validation, splits.test)
    chance = majority_accuracy(splits.test[1])
    return Setup(dense([64, 64, 64, 6]), data, loss, nearest_centre(splits.train), chance)


@suite_task("embeddings", "accuracy %", "higher", steps=300, batch_size=32)
def triplets() -> Setup:
    """An anchor, one of its class and one of another; one encoder called three times."""
    splits = flat_digits(0.2)
    x, y = (tensor.repeat(PARTNERS, *[1] * (tensor.dim() - 1)) for tensor in splits.train)
    source = generator(61)
    near, far = x[partners(y, True, source)], x[partners(y, False, source)]

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        anchor, positive, negative = batch
        return F.triplet_margin_loss(model(anchor), model(positive), model(negative), margin=0.5)

    data = Splits((x, near, far), splits.validation, splits.test)
    chance = majority_accuracy(splits.test[1])
    return Setup(dense([64, 64, 64, 8], nn.Tanh), data, loss, nearest_centre(splits.train), chance)


class TwoEncoders(nn.Module):
    """Unit vectors of the two halves of a picture, and a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = dense([32, 64, 64, 24]), dense([32, 64, 64, 24])
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        a, b = F.normalize(self.left(left), dim=1), F.normalize(self.right(right), dim=1)
        return self.log_scale.exp() * a @ b.T


@suite_task("embeddings", "accuracy %", "higher", steps=400, batch_size=50)
def matching_halves() -> Setup:
    """Which right half of a digit belongs to which left half, among the 50 of a batch (CLIP's loss)."""

    def halves(data: Batch) -> Batch:
        return data[0][:, :, :4].flatten(1), data[0][:, :, 4:].flatten(1)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        similarity = model(*batch)
        target = torch.arange(len(similarity))
        return (F.cross_entropy(similarity, target) + F.cross_entropy(similarity.T, target)) / 2

    def matched(model: nn.Module, data: Batch) -> float:
        right = 0
        for left, other in zip(data[0].split(10), data[1].split(10), strict=True):
            right += int((model(left, other).argmax(1) == torch.arange(len(left))).sum())
        return 100 * right / len(data[0])

    parts = digits()
    splits = Splits(halves(parts.train), halves(parts.validation), halves(parts.test))
    return Setup(TwoEncoders(), splits, loss, matched, chance=10.0)


TASKS = (contrastive_pairs, triplets, matching_halves)
