"""Tables with losses of their own: clicks, claims with many zeros, evidence, gross errors, choices between two."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from sklearn.datasets import make_friedman3
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

from ddpnopt.lab.suite.data import generator, split, standardised
from ddpnopt.lab.suite.fully_connected import dense
from ddpnopt.lab.suite.task import Batch, Setup, Splits, suite_task

GROUPS, KINDS, DEVICES, HOURS = 24, 30, 6, 24


def sized(codes: int) -> nn.Embedding:
    """Eight small numbers for each code."""
    embedding = nn.Embedding(codes, 8)
    nn.init.normal_(embedding.weight, std=0.3)
    return embedding


class WideAndDeep(nn.Module):
    """A weight for each pair of group and device, and a network of embeddings and numbers; the sum is the logit."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.wide = nn.Embedding(GROUPS * DEVICES, 1)
        nn.init.zeros_(self.wide.weight)
        self.columns = nn.ModuleList(sized(size) for size in (GROUPS, KINDS, DEVICES, HOURS))
        self.deep = dense([32 + numbers, 128, 64, 1])

    def forward(self, codes: Tensor, numbers: Tensor) -> Tensor:
        parts = [column(codes[:, place]) for place, column in enumerate(self.columns)]
        crossed = self.wide(codes[:, 0] * DEVICES + codes[:, 2])
        return (crossed + self.deep(torch.cat([*parts, numbers], 1)))[:, 0]


def clicks(number: int = 14000) -> Splits:
    """Who clicks: tastes of groups for kinds, exceptions for pairs of group and device, the hour, five numbers."""
    source = generator(201)
    codes = torch.stack([torch.randint(k, (number,), generator=source) for k in (GROUPS, KINDS, DEVICES, HOURS)], 1)
    numbers = torch.randn(number, 5, generator=source)
    taste = torch.randn(GROUPS, 3, generator=source) @ torch.randn(3, KINDS, generator=source)
    exception = 2.5 * torch.randn(GROUPS, DEVICES, generator=source)
    exception = exception * (torch.rand(GROUPS, DEVICES, generator=source) < 0.3)
    hour = torch.cos(2 * torch.pi * (codes[:, 3] - 20) / HOURS)
    logit = 1.2 * taste[codes[:, 0], codes[:, 1]] + exception[codes[:, 0], codes[:, 2]] + hour - 2
    logit = logit + numbers[:, 0] * numbers[:, 1] + numbers[:, 2].abs()
    clicked = torch.rand(number, generator=source) < torch.sigmoid(logit)
    return split((codes, numbers, clicked.float()), 1500, 3000)


@suite_task("fully connected", "AUC %", "higher", steps=600, batch_size=200, sealed=True)
def wide_and_deep_clicks() -> Setup:
    """Clicks from four columns of codes and five numbers by a wide part and a deep part."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(*batch[:2]), batch[2])

    def measure(model: nn.Module, data: Batch) -> float:
        score = model(*data[:2])
        return 100 * float(roc_auc_score(data[2].numpy(), score.numpy())) if score.isfinite().all() else math.nan

    return Setup(WideAndDeep(5), clicks(), loss, measure, chance=50.0)


POWER = 1.5


def tweedie_deviance(mean: Tensor, y: Tensor) -> Tensor:
    """Deviance of a compound of Poisson and gamma with this mean; zero if it is y."""
    a, b = 1 - POWER, 2 - POWER
    return 2 * (y**b / (a * b) - y * mean**a / a + mean**b / b).mean()


@suite_task("regression", "deviance", "lower", steps=500, batch_size=128, sealed=True)
def tweedie_claims() -> Setup:
    """What a contract costs in the time it runs, mostly nothing: Tweedie's likelihood with a logarithmic link."""
    source = generator(202)
    number = 12000
    x = torch.randn(number, 9, generator=source)
    exposure = 0.2 + 0.8 * torch.rand(number, generator=source)
    often = 1.2 * torch.exp(torch.sin(2 * x[:, 0]) + 0.7 * x[:, 1] * x[:, 2] - 0.4 * x[:, 3].abs()).clamp_max(6)
    size = torch.exp(0.8 * torch.tanh(x[:, 4]) + 0.5 * x[:, 5])
    times = torch.poisson(often * exposure, generator=source)
    # The sum of k exponential costs; no contract has more than forty.
    each = -torch.rand(number, 40, generator=source).clamp_min(1e-9).log() * (torch.arange(40) < times[:, None])
    splits = split((x, exposure, size * each.sum(1)), 1500, 3000)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        rate = model(batch[0])[:, 0] + batch[1].log()
        a, b = 1 - POWER, 2 - POWER
        return (torch.exp(b * rate) / b - batch[2] * torch.exp(a * rate) / a).mean()

    def measure(model: nn.Module, data: Batch) -> float:
        return tweedie_deviance(data[1] * model(data[0])[:, 0].exp(), data[2]).item()

    rate = splits.train[2].sum() / splits.train[1].sum()
    chance = tweedie_deviance(rate * splits.test[1], splits.test[2]).item()
    return Setup(dense([9, 128, 128, 1], nn.SiLU), splits, loss, measure, chance)


def evidence(outputs: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean, evidence for it, and shape and scale of the variance's distribution."""
    mean, nu, alpha, beta = outputs.unbind(1)
    return mean, F.softplus(nu) + 1e-3, F.softplus(alpha) + 1.01, F.softplus(beta) + 1e-3


def evidential_nats(outputs: Tensor, y: Tensor) -> Tensor:
    """Negative logarithm of the probability of y, mean and variance of which are uncertain themselves."""
    mean, nu, alpha, beta = evidence(outputs)
    omega = 2 * beta * (1 + nu)
    shape = torch.lgamma(alpha) - torch.lgamma(alpha + 0.5) - alpha * omega.log()
    return ((math.pi / nu).log() / 2 + shape + (alpha + 0.5) * (nu * (y - mean) ** 2 + omega).log()).mean()


@suite_task("regression", "nats", "lower", steps=500, batch_size=64, sealed=True)
def evidential_phases() -> Setup:
    """The phase of a circuit (Friedman's third function) with errors of different size: evidential regression."""
    x, y = make_friedman3(5000, random_state=203)
    inputs, target = torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)
    target = (target - target.mean()) / target.std()
    spread = 0.05 + 0.4 * (inputs[:, 3] / 11).clamp(0, 1) ** 2
    target = target + spread * torch.randn(len(target), generator=generator(203))
    parts = split((inputs, target), 700, 1500)
    columns = standardised(parts.train[0], parts.validation[0], parts.test[0])
    splits = Splits((columns[0], parts.train[1]), (columns[1], parts.validation[1]), (columns[2], parts.test[1]))

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        outputs = model(batch[0])
        mean, nu, alpha, _ = evidence(outputs)
        return evidential_nats(outputs, batch[1]) + 0.01 * ((batch[1] - mean).abs() * (2 * nu + alpha)).mean()

    train, test = splits.train[1], splits.test[1]
    chance = F.gaussian_nll_loss(train.mean().expand_as(test), test, train.var().expand_as(test), full=True).item()
    model = dense([4, 96, 96, 4])
    return Setup(model, splits, loss, lambda net, data: evidential_nats(net(data[0]), data[1]).item(), chance)


@suite_task("batch size", "absolute error", "lower", steps=600, batch_size=5, sealed=True)
def five_readings_huber() -> Setup:
    """Five readings per batch, each column in its own unit, some targets far off: Huber's loss; the test has none."""
    source = generator(204)
    number = 6000
    x = torch.randn(number, 8, generator=source)
    unit = torch.tensor([10.0, 0.2, 1.0, 5.0, 0.5, 2.0, 0.3, 3.0])
    y = 1.5 * torch.tanh(2 * x[:, 0]) + x[:, 1] * x[:, 2].sigmoid() + x[:, 3].abs() - x[:, 4] + 0.5 * x[:, 6]
    y = y + 0.1 * torch.randn(number, generator=source)
    parts = split((unit * x, y), 700, 1500)
    wild = torch.rand(len(parts.train[1]), generator=source) < 0.1
    noise = 8 * torch.randn(len(wild), generator=source)
    splits = Splits((parts.train[0], parts.train[1] + wild * noise), parts.validation, parts.test)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.huber_loss(model(batch[0])[:, 0], batch[1], delta=0.5)

    def measure(model: nn.Module, data: Batch) -> float:
        return F.l1_loss(model(data[0])[:, 0], data[1]).item()

    chance = (splits.test[1] - splits.train[1].median()).abs().mean().item()
    return Setup(dense([8, 128, 128, 1]), splits, loss, measure, chance)


@suite_task("labels", "pairs right %", "higher", steps=500, batch_size=64, sealed=True)
def margin_of_choices() -> Setup:
    """Which of two offers was taken: its score is to be higher by a margin; one choice in ten is careless."""
    source = generator(205)
    number = 7000
    offers = torch.randn(number, 2, 10, generator=source)
    first, second = torch.randn(10, 12, generator=source) / 2, torch.randn(12, generator=source)
    worth = torch.sin(2 * offers @ first) @ second - offers[:, :, 0] ** 2
    better = (worth[:, 0] > worth[:, 1]).float() * 2 - 1
    parts = split((offers, better), 800, 2000)
    careless = torch.rand(len(parts.train[1]), generator=source) < 0.1
    splits = Splits((parts.train[0], parts.train[1] * (1 - 2 * careless.float())), parts.validation, parts.test)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        score = model(batch[0])[:, :, 0]
        return F.margin_ranking_loss(score[:, 0], score[:, 1], batch[1], margin=1.0)

    def measure(model: nn.Module, data: Batch) -> float:
        score = model(data[0])[:, :, 0]
        return 100 * ((score[:, 0] - score[:, 1]) * data[1] > 0).double().mean().item()

    return Setup(dense([10, 128, 128, 1], nn.GELU), splits, loss, measure, chance=50.0)


TASKS = (wide_and_deep_clicks, tweedie_claims, evidential_phases, five_readings_huber, margin_of_choices)
