"""Targets that are no plain numbers: quantiles, counts with a tiny loss, times of which some are only bounds."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt.lab.suite.data import generator, split
from ddpnopt.lab.suite.fully_connected import dense
from ddpnopt.lab.suite.task import Batch, Setup, suite_task

QUANTILES = torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95])


def pinball(found: Tensor, y: Tensor) -> Tensor:
    """The loss whose minimum is at the quantiles; summed over them, mean over samples."""
    error = y[:, None] - found
    return torch.maximum(QUANTILES * error, (QUANTILES - 1) * error).sum(1).mean()


@suite_task("regression", "pinball loss", "lower", steps=500, batch_size=64)
def quantiles() -> Setup:
    """Five quantiles of a target whose noise is skewed and depends on the inputs."""
    source = generator(91)
    x = torch.randn(4000, 6, generator=source)
    noise = torch.empty(4000).exponential_(generator=source) - 0.7
    y = torch.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2] + F.softplus(x[:, 3]) * 0.5 * noise
    splits = split((x, y), 500, 1000)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return pinball(model(batch[0]), batch[1])

    chance = pinball(splits.train[1].quantile(QUANTILES), splits.test[1]).item()
    return Setup(dense([6, 64, 64, 5]), splits, loss, lambda net, data: loss(net, data).item(), chance)


def deviance(log_rate: Tensor, count: Tensor) -> float:
    """Poisson deviance per sample: twice the nats above the best rate of each sample."""
    best = torch.xlogy(count, count) - count
    return 2 * (best - (count * log_rate - log_rate.exp())).mean().item()


@suite_task("regression", "deviance", "lower", steps=500, batch_size=96)
def counts_tiny_loss() -> Setup:
    """Counts from zero to some dozens by their logarithmic rate; the loss is multiplied by 1e-4."""
    source = generator(92)
    x = torch.rand(5000, 5, generator=source) * 2 - 1
    log_rate = 1 + torch.sin(3 * x[:, 0]) + 1.5 * x[:, 1] * x[:, 2] + x[:, 3].abs()
    splits = split((x, torch.poisson(log_rate.exp(), generator=source)), 600, 1200)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return 1e-4 * F.poisson_nll_loss(model(batch[0])[:, 0], batch[1])

    def measure(model: nn.Module, data: Batch) -> float:
        return deviance(model(data[0])[:, 0], data[1])

    counts = splits.test[1]
    chance = deviance(splits.train[1].mean().log().expand_as(counts), counts)
    return Setup(dense([5, 64, 64, 1], nn.Tanh), splits, loss, measure, chance)


def concordance(model: nn.Module, data: Batch) -> float:
    """Of the pairs whose order in time is known, the share in which the earlier has the higher risk."""
    x, time, seen = data
    risk = model(x)[:, 0]
    known = (time[:, None] < time[None, :]) & (seen[:, None] > 0)
    right = (risk[:, None] > risk[None, :]).double() + 0.5 * (risk[:, None] == risk[None, :]).double()
    return 100 * right[known].mean().item()


@suite_task("labels", "concordance %", "higher", steps=400, batch_size=40)
def survival() -> Setup:
    """Times to an event, a third of them cut off: Cox's partial likelihood, in which the samples compete."""
    source = generator(93)
    x = torch.randn(3000, 10, generator=source)
    risk = 2 * x[:, 0] * x[:, 1] + 1.5 * torch.sin(2 * x[:, 2]) + x[:, 3]
    time = torch.empty(3000).exponential_(generator=source) * torch.exp(-risk)
    end = torch.empty(3000).exponential_(generator=source) * 3
    splits = split((x, torch.minimum(time, end), (time <= end).float()), 500, 800)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        inputs, until, seen = batch
        score = model(inputs)[:, 0]
        still_there = until[None, :] >= until[:, None]
        rivals = score.expand(len(score), -1).masked_fill(~still_there, -torch.inf).logsumexp(1)
        return (seen * (rivals - score)).sum() / seen.sum().clamp_min(1)

    # The last layer has no bias: the loss does not depend on it.
    model = nn.Sequential(*dense([10, 48, 48]), nn.ReLU(), nn.Linear(48, 1, bias=False))
    return Setup(model, splits, loss, concordance, chance=50.0)


TASKS = (quantiles, counts_tiny_loss, survival)
