"""Labels with an order: grades by their thresholds, documents of a query, and rare classes that count as much."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sklearn.datasets import make_friedman2
from torch import Tensor, nn

from ddpnopt.lab.suite.data import generator, scattered_digits, split
from ddpnopt.lab.suite.fully_connected import dense
from ddpnopt.lab.suite.task import Batch, Setup, Splits, suite_task

GRADES = 6


class OrdinalNet(nn.Module):
    """One score and the logits of being above each of five thresholds (CORAL)."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.score = nn.Sequential(*dense([inputs, 48, 48]), nn.ReLU(), nn.Linear(48, 1, bias=False))
        self.thresholds = nn.Parameter(torch.linspace(1, -1, GRADES - 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.score(x) + self.thresholds


@suite_task("labels", "absolute error", "lower", steps=400, batch_size=50)
def ordinal_grades() -> Setup:
    """Six unequal grades of an alternating-current circuit (Friedman's second function); by how many grades it errs."""
    x, y = make_friedman2(4000, noise=60.0, random_state=137)
    inputs, value = torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)
    bounds = value.quantile(torch.tensor([0.1, 0.3, 0.55, 0.8, 0.95]))
    inputs = (inputs - inputs.mean(0)) / inputs.std(0)
    noise = 0.05 * torch.randn(inputs.shape, generator=generator(137))
    splits = split((inputs + noise, (value[:, None] > bounds).sum(1)), 500, 1000)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        above = (batch[1][:, None] > torch.arange(GRADES - 1)).float()
        return F.binary_cross_entropy_with_logits(model(batch[0]), above)

    def measure(model: nn.Module, data: Batch) -> float:
        return ((model(data[0]) > 0).sum(1) - data[1]).abs().double().mean().item()

    chance = (splits.test[1] - splits.train[1].median()).abs().double().mean().item()
    return Setup(OrdinalNet(4), splits, loss, measure, chance)


def queries(number: int = 1500, documents: int = 12) -> Splits:
    """Twelve documents of each query by 16 features, of which some depend on the query, and a relevance of 0 to 4."""
    source = generator(138)
    query = torch.randn(number, 1, 6, generator=source).expand(-1, documents, -1)
    own = torch.randn(number, documents, 10, generator=source)
    match = (query * own[..., :6]).sum(2) / 2
    value = match + torch.sin(2 * own[..., 6]) + own[..., 7] * own[..., 8]
    value = value + 0.5 * torch.randn(number, documents, generator=source)
    relevance = (value[..., None] > torch.tensor([0.5, 1.2, 2.0, 2.8])).sum(2)
    return split((torch.cat([query, own], 2), relevance), 200, 400)


def discounted_gain(score: Tensor, relevance: Tensor) -> Tensor:
    """Sum of the gains of the first five places, each with the weight of its place."""
    first = relevance.gather(1, score.argsort(1, descending=True))[:, :5]
    return ((2.0**first - 1) / torch.arange(2.0, 7.0).log2()).sum(1)


def normalised_gain(score: Tensor, relevance: Tensor) -> float:
    """NDCG of the first five in percent; queries without a relevant document do not count."""
    best = discounted_gain(relevance.float(), relevance)
    return 100 * (discounted_gain(score, relevance) / best)[best > 0].double().mean().item()


@suite_task("labels", "NDCG %", "higher", steps=400, batch_size=16)
def listwise_ranking() -> Setup:
    """Scores of the documents of a query, whose softmax is to be that of their relevance (ListNet)."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        features, relevance = batch
        return F.cross_entropy(model(features)[..., 0], relevance.float().softmax(1))

    def measure(model: nn.Module, data: Batch) -> float:
        return normalised_gain(model(data[0])[..., 0], data[1])

    splits = queries()
    relevance = splits.test[1]
    chance = normalised_gain(torch.rand(relevance.shape, generator=generator(139)), relevance)
    model = nn.Sequential(*dense([16, 64, 64]), nn.ReLU(), nn.Linear(64, 1, bias=False))
    return Setup(model, splits, loss, measure, chance)


def long_tail(splits: Splits) -> Splits:
    """Of each class of the training data seven tenths of the share of the one before."""
    x, y = splits.train
    kept = []
    for label in range(10):
        rows = (y == label).nonzero()[:, 0]
        kept.append(rows[: max(int(len(rows) * 0.7**label), 8)])
    rows = torch.cat(kept)
    return Splits((x[rows], y[rows]), splits.validation, splits.test)


@suite_task("labels", "accuracy %", "higher", steps=400, batch_size=32)
def long_tailed_digits() -> Setup:
    """Frequent and rare digits weighted by the root of their frequency; the held-out ones are equally frequent."""
    splits = long_tail(scattered_digits(10, 0.15, 4))
    counts = splits.train[1].bincount().float()
    weight = (counts.mean() / counts).sqrt()

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y, weight=weight)

    def measure(model: nn.Module, data: Batch) -> float:
        right = (model(data[0]).argmax(1) == data[1]).double()
        return 100 * torch.stack([right[data[1] == label].mean() for label in range(10)]).mean().item()

    model = nn.Sequential(
        nn.Conv2d(1, 16, 3),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(32 * 16, 10),
    )
    return Setup(model, splits, loss, measure, chance=10.0)


TASKS = (ordinal_grades, listwise_ranking, long_tailed_digits)
