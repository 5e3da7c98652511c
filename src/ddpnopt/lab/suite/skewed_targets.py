"""Targets whose distribution is the point: sums of claims by a gamma likelihood, several answers by a mixture."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt.lab.suite.data import generator, split
from ddpnopt.lab.suite.fully_connected import dense
from ddpnopt.lab.suite.task import Batch, Setup, Splits, suite_task


def claims(number: int = 8000) -> Splits:
    """Region, brand and five numbers of an insured car, and what its claim costs: a gamma variable of shape 2."""
    source = generator(135)
    region = torch.multinomial(1 / torch.arange(1.0, 31), number, replacement=True, generator=source)
    brand = torch.randint(12, (number,), generator=source)
    x = torch.rand(number, 5, generator=source) * 2 - 1
    level = 0.6 * torch.randn(30, generator=source)[region] + 0.4 * torch.randn(12, generator=source)[brand]
    level = level + torch.cos(3 * x[:, 0]) + 1.5 * x[:, 1] * x[:, 2] + 0.5 * x[:, 3]
    gamma = torch.empty(2, number).exponential_(generator=source).mean(0)
    return split((region, brand, x, 3 * level.exp() * gamma), 1000, 2000)


class ClaimNet(nn.Module):
    """Vectors of region and brand beside the numbers; the logarithm of the expected cost."""

    def __init__(self) -> None:
        super().__init__()
        self.region, self.brand = nn.Embedding(30, 6), nn.Embedding(12, 4)
        self.body = dense([15, 64, 64, 1])

    def forward(self, region: Tensor, brand: Tensor, x: Tensor) -> Tensor:
        return self.body(torch.cat([self.region(region), self.brand(brand), x], 1))[:, 0]


def gamma_deviance(log_mean: Tensor, y: Tensor) -> Tensor:
    """Twice the nats above the best mean of each sample."""
    ratio = y.log() - log_mean
    return 2 * (ratio.exp() - 1 - ratio).mean()


@suite_task("regression", "deviance", "lower", steps=900, batch_size=100)
def gamma_claims() -> Setup:
    """The cost of claims by the gamma likelihood with a logarithmic link."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        log_mean, y = model(*batch[:3]), batch[3]
        return (log_mean + y * torch.exp(-log_mean)).mean()

    def measure(model: nn.Module, data: Batch) -> float:
        return gamma_deviance(model(*data[:3]), data[3]).item()

    splits = claims()
    cost = splits.test[3]
    chance = gamma_deviance(splits.train[3].mean().log().expand_as(cost), cost).item()
    return Setup(ClaimNet(), splits, loss, measure, chance)


def robot_arm(number: int = 4000) -> Splits:
    """Where the hand of an arm of two links is, and its two angles: often two pairs of angles lead there."""
    source = generator(136)
    angle = torch.stack([0.3 + 0.9 * torch.rand(number, generator=source), torch.randn(number, generator=source)], 1)
    elbow = torch.stack([angle[:, 0].cos(), angle[:, 0].sin()], 1) * 0.8
    whole = angle.sum(1)
    hand = elbow + 0.5 * torch.stack([whole.cos(), whole.sin()], 1)
    return split((hand, angle + 0.02 * torch.randn(number, 2, generator=source)), 500, 1000)


def mixture_nats(outputs: Tensor, y: Tensor, parts: int) -> Tensor:
    """Negative log-likelihood of a mixture of Gaussians, each with its own deviation per coordinate."""
    weight, rest = outputs[:, :parts].log_softmax(1), outputs[:, parts:].view(len(y), parts, 2, -1)
    mean, deviation = rest[:, :, 0], F.softplus(rest[:, :, 1]) + 0.01
    error = (y[:, None] - mean) / deviation
    logs = weight - (0.5 * error**2 + deviation.log() + 0.5 * math.log(2 * math.pi)).sum(2)
    return -logs.logsumexp(1).mean()


@suite_task("regression", "nats", "lower", steps=600, batch_size=64)
def mixture_density() -> Setup:
    """The angles of an arm from the place of its hand, as a mixture of four; chance is one Gaussian for all."""
    splits = robot_arm()

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return mixture_nats(model(batch[0]), batch[1], 4)

    train, test = splits.train[1], splits.test[1]
    chance = -torch.distributions.MultivariateNormal(train.mean(0), train.T.cov()).log_prob(test).mean().item()
    model = dense([2, 48, 48, 4 * 5], nn.Tanh)
    return Setup(model, splits, loss, lambda net, data: loss(net, data).item(), chance)


TASKS = (gamma_claims, mixture_density)
