"""Labels that do not say it all: positives among the unlabelled, a label for a bag, a teacher's doubts, two answers."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from sklearn.datasets import make_classification
from torch import Tensor, nn

from ddpnopt.lab.suite.data import add_noise, digits, flat_digits, generator, split
from ddpnopt.lab.suite.fully_connected import cross_entropy, dense
from ddpnopt.lab.suite.measures import accuracy, majority_accuracy
from ddpnopt.lab.suite.pretrained import pretrain
from ddpnopt.lab.suite.task import Batch, Setup, Splits, suite_task

PRIOR = 0.4


@suite_task("labels", "accuracy %", "higher", steps=500, batch_size=128, sealed=True)
def positive_unlabelled() -> Setup:
    """Some positives are known, all others may be either: the risk that is held above zero, with sigmoid losses."""
    x, y = make_classification(
        9000,
        20,
        n_informative=8,
        n_redundant=4,
        n_clusters_per_class=3,
        weights=[1 - PRIOR],
        class_sep=1.3,
        random_state=178,
    )
    parts = split((torch.tensor(x, dtype=torch.float32), torch.tensor(y)), 1000, 2500)
    known = (parts.train[1] == 1) & (torch.rand(len(parts.train[1]), generator=generator(178)) < 0.4)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        score, known = model(batch[0])[:, 0], batch[1].float()
        positives, others = known.sum().clamp_min(1), (1 - known).sum().clamp_min(1)
        wrong, right = torch.sigmoid(-score), torch.sigmoid(score)
        missed = PRIOR * (wrong * known).sum() / positives
        alarms = (right * (1 - known)).sum() / others - PRIOR * (right * known).sum() / positives
        return missed + alarms.clamp_min(0)

    def measure(model: nn.Module, data: Batch) -> float:
        return 100 * ((model(data[0])[:, 0] > 0) == (data[1] == 1)).double().mean().item()

    splits = Splits((parts.train[0], known), parts.validation, parts.test)
    return Setup(dense([20, 64, 64, 1]), splits, loss, measure, majority_accuracy(parts.test[1]))


def bags(length: int = 8) -> Splits:
    """Eight digits each, noisy; the label is whether there is a nine among them."""
    source = generator(179)

    def drawn(data: Batch, number: int) -> Batch:
        pictures, labels = data[0].flatten(1), data[1]
        other, nine = (labels != 9).nonzero()[:, 0], (labels == 9).nonzero()[:, 0]
        chosen = other[torch.randint(len(other), (number, length), generator=source)]
        has = torch.rand(number, generator=source) < 0.5
        chosen[:, 0] = torch.where(has, nine[torch.randint(len(nine), (number,), generator=source)], chosen[:, 0])
        x = pictures[chosen]
        return x + 0.2 * torch.randn(x.shape, generator=source), has.float()

    parts = digits()
    return Splits(drawn(parts.train, 3000), drawn(parts.validation, 800), drawn(parts.test, 2000))


class AttentionPool(nn.Module):
    """A vector of each picture, their mean weighted by a gated attention, one answer for the bag."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.each = dense([64, 64, width])
        self.value, self.gate, self.score = nn.Linear(width, 24), nn.Linear(width, 24), nn.Linear(24, 1)
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.each(x))
        weight = self.score(torch.tanh(self.value(h)) * torch.sigmoid(self.gate(h))).softmax(1)
        return self.head((weight * h).sum(1))[:, 0]


@suite_task("labels", "accuracy %", "higher", steps=500, batch_size=32, sealed=True)
def bags_of_digits() -> Setup:
    """Which bags hold a nine, without being told which digit it is (multiple instances)."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(batch[0]), batch[1])

    def measure(model: nn.Module, data: Batch) -> float:
        return 100 * ((model(data[0]) > 0) == (data[1] > 0)).double().mean().item()

    splits = bags()
    has = splits.test[1].mean().item()
    return Setup(AttentionPool(), splits, loss, measure, 100 * max(has, 1 - has))


@lru_cache
def teacher() -> nn.Sequential:
    """A wide classifier of noisy digits, the same for all seeds."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(180)
        model = dense([64, 256, 256, 10])
        pretrain(model, flat_digits(0.35).train, cross_entropy, 200, 64)
    return model.requires_grad_(False)


@suite_task("labels", "accuracy %", "higher", steps=400, batch_size=64, sealed=True)
def distilled_digits() -> Setup:
    """A narrow network learns a wide one's softened answers and a little of the labels (distillation)."""
    warmth, old = 3.0, teacher()

    source = generator(180)

    def copied(data: Batch) -> Batch:
        x, y = (tensor.repeat_interleave(3, 0) for tensor in data)
        return x + 0.35 * torch.randn(x.shape, generator=source), y

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x, y = batch
        logits = model(x)
        softened = F.kl_div((logits / warmth).log_softmax(1), (old(x) / warmth).softmax(1), reduction="batchmean")
        return warmth**2 * softened * 0.8 + 0.2 * F.cross_entropy(logits, y)

    parts = flat_digits()
    splits = Splits(parts.train, copied(parts.validation), copied(parts.test))
    chance = majority_accuracy(splits.test[1])
    return Setup(dense([64, 24, 24, 10]), splits, loss, accuracy, chance, add_noise(0.35))


class TwoAnswers(nn.Module):
    """A shared body, a kind and three numbers, and how uncertain each of both is."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.body = nn.Sequential(dense([16, width, width], nn.GELU), nn.GELU())
        self.kind, self.numbers = nn.Linear(width, 6), nn.Linear(width, 3)
        self.log_variance = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.body(x)
        return self.kind(h), self.numbers(h), self.log_variance


@suite_task("labels", "relative error", "lower", steps=500, batch_size=64, sealed=True)
def learned_weights_of_two() -> Setup:
    """One of six kinds and three numbers, weighted by learned uncertainties.

    The metric is the mean of both losses as shares of what is got without the inputs.
    """
    source = generator(181)
    x = torch.randn(7000, 16, generator=source)
    first, second = torch.randn(16, 24, generator=source) / 3, torch.randn(24, 9, generator=source)
    made = torch.sin(x @ first) @ second
    kind = (made[:, :6] + torch.randn(7000, 6, generator=source)).argmax(1)
    splits = split((x, kind, 0.2 * made[:, 6:] + 0.1 * torch.randn(7000, 3, generator=source)), 800, 1500)

    def both(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        logits, numbers, log_variance = model(batch[0])
        return F.cross_entropy(logits, batch[1]), F.mse_loss(numbers, batch[2]), log_variance

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        kinds, numbers, log_variance = both(model, batch)
        weight = torch.exp(-log_variance)
        return weight[0] * kinds + 0.5 * weight[1] * numbers + 0.5 * log_variance.sum()

    shares = splits.train[1].bincount() / len(splits.train[1])
    entropy, spread = -(shares * shares.log()).sum().item(), splits.train[2].var(0).mean().item()

    def measure(model: nn.Module, data: Batch) -> float:
        kinds, numbers, _ = both(model, data)
        return (kinds.item() / entropy + numbers.item() / spread) / 2

    return Setup(TwoAnswers(), splits, loss, measure, chance=1.0)


TASKS = (positive_unlabelled, bags_of_digits, distilled_digits, learned_weights_of_two)
