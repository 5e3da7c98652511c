"""Targets with likelihoods of their own: returns with heavy tails, proportions, counts with too many zeros."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt.lab.suite.data import generator, split
from ddpnopt.lab.suite.fully_connected import dense
from ddpnopt.lab.suite.task import Batch, LossOf, Setup, suite_task


def likelihood(model: nn.Module, splits_of: tuple[Tensor, Tensor], loss: LossOf, constant: Tensor) -> Setup:
    """A task whose metric is its loss; chance is the loss of outputs that do not depend on the inputs."""
    splits = split(splits_of, 1000, 2500)

    class Constant(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return constant.expand(len(x), -1)

    chance = loss(Constant(), splits.test).item()
    return Setup(model, splits, loss, lambda net, data: loss(net, data).item(), chance)


def student_nats(outputs: Tensor, y: Tensor) -> Tensor:
    """Negative log-likelihood of Student's distribution by its mean, scale and degrees of freedom above two."""
    mean, scale, freedom = outputs.unbind(1)
    return -torch.distributions.StudentT(2 + F.softplus(freedom), mean, F.softplus(scale) + 1e-3).log_prob(y).mean()


@suite_task("regression", "nats", "lower", steps=600, batch_size=64, sealed=True)
def student_returns() -> Setup:
    """Returns whose mean, spread and tails depend on ten features: Student's likelihood with three outputs."""
    source = generator(174)
    x = torch.randn(9000, 10, generator=source)
    spread = torch.exp(0.6 * x[:, 0] + 0.4 * torch.sin(2 * x[:, 1]) - 1)
    heavy = torch.where(x[:, 2] > 0, 0.6, 1.5)
    chi = torch.randn(9000, 4, generator=source).square().mean(1) ** heavy
    y = torch.tanh(x[:, 3] * x[:, 4]) + 0.3 * x[:, 5] + spread * torch.randn(9000, generator=source) / chi.sqrt()

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return student_nats(model(batch[0]), batch[1])

    return likelihood(dense([10, 64, 64, 3], nn.SiLU), (x, y), loss, torch.tensor([[0.0, 0.3, 0.0]]))


@suite_task("regression", "nats", "lower", steps=600, batch_size=50, sealed=True)
def beta_proportions() -> Setup:
    """Shares between zero and one by the beta likelihood, with a mean and a precision that depend on the inputs."""
    source = generator(175)
    x = torch.rand(8000, 6, generator=source) * 2 - 1
    mean = torch.sigmoid(2 * torch.sin(3 * x[:, 0]) + 2 * x[:, 1] * x[:, 2] - 0.5)
    precision = torch.exp(2 + 1.5 * x[:, 3])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(175)
        y = torch.distributions.Beta(mean * precision, (1 - mean) * precision).sample().clamp(1e-3, 1 - 1e-3)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        mean, precision = model(batch[0]).unbind(1)
        share, strength = torch.sigmoid(mean), torch.exp(precision) + 0.1
        return -torch.distributions.Beta(share * strength, (1 - share) * strength).log_prob(batch[1]).mean()

    return likelihood(dense([6, 48, 48, 2], nn.Tanh), (x, y), loss, torch.tensor([[-0.2, 0.3]]))


@suite_task("regression", "nats", "lower", steps=500, batch_size=64, sealed=True)
def zero_inflated_counts() -> Setup:
    """Visits of people, most of whom never come: a zero for certain, or else Poisson's count."""
    source = generator(176)
    x = torch.randn(9000, 12, generator=source)
    comes = torch.sigmoid(1.5 * x[:, 0] - x[:, 1] * x[:, 2] - 0.3)
    rate = torch.exp(1 + 0.5 * torch.sin(2 * x[:, 3]) + 0.4 * x[:, 4] + 0.3 * x[:, 5].abs())
    y = torch.poisson(rate, generator=source) * (torch.rand(9000, generator=source) < comes)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        never, log_rate = model(batch[0]).unbind(1)
        count, rate = batch[1], log_rate.exp()
        zero = torch.logaddexp(F.logsigmoid(never), F.logsigmoid(-never) - rate)
        more = F.logsigmoid(-never) + count * log_rate - rate - torch.lgamma(count + 1)
        return -torch.where(count == 0, zero, more).mean()

    return likelihood(dense([12, 64, 64, 2]), (x, y), loss, torch.tensor([[0.3, math.log(3.6)]]))


TASKS = (student_returns, beta_proportions, zero_inflated_counts)
