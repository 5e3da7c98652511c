"""One row per batch with heavy-tailed noise, and 1,024 rows with two losses of very different scale."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt.lab.suite.data import generator, split
from ddpnopt.lab.suite.fully_connected import dense
from ddpnopt.lab.suite.task import Batch, Setup, suite_task


@suite_task("batch size", "absolute error", "lower", steps=2000, batch_size=1)
def batch_of_one() -> Setup:
    """Sensor readings one at a time, some far off: the loss is the logarithm of the error's hyperbolic cosine."""
    source = generator(140)
    x = torch.randn(4000, 8, generator=source)
    signal = torch.sin(x[:, 0] + x[:, 1]) + 0.5 * x[:, 2] * x[:, 3].sign() + 0.5 * x[:, 4].abs()
    tails = torch.randn(4000, generator=source) / torch.randn(4000, generator=source).abs().clamp_min(0.05)
    splits = split((x, signal + 0.1 * tails), 500, 1000)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        error = model(batch[0])[:, 0] - batch[1]
        return (error + F.softplus(-2 * error) - math.log(2)).mean()

    def measure(model: nn.Module, data: Batch) -> float:
        return (model(data[0])[:, 0] - data[1]).abs().median().item()

    chance = (splits.test[1] - splits.train[1].median()).abs().median().item()
    return Setup(dense([8, 32, 32, 1], nn.ELU), splits, loss, measure, chance)


class TwoHeads(nn.Module):
    """Shared layers with batch norm, a price and a kind."""

    def __init__(self, inputs: int, kinds: int, width: int = 64) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before in (inputs, width):
            layers += [nn.Linear(before, width), nn.BatchNorm1d(width), nn.ReLU()]
        self.body = nn.Sequential(*layers)
        self.price, self.kind = nn.Linear(width, 1), nn.Linear(width, kinds)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x)
        return self.price(h)[:, 0], self.kind(h)


@suite_task("batch size", "relative error", "lower", steps=400, batch_size=1024)
def batch_of_1024_two_scales() -> Setup:
    """Prices about their mean and one of five kinds, squared error plus cross-entropy: the first is far larger.

    The metric is the mean of both on held-out data, each as a share of what is got without the inputs.
    """
    source = generator(141)
    x = torch.randn(12000, 15, generator=source)
    first, second = torch.randn(15, 20, generator=source) / 3, torch.randn(20, 6, generator=source)
    made = torch.tanh(x @ first) @ second + 0.3 * torch.randn(12000, 6, generator=source)
    splits = split((x, 10 * made[:, 0], made[:, 1:].argmax(1)), 1500, 2500)
    spread = splits.train[1].var().item()
    shares = splits.train[2].bincount() / len(splits.train[2])
    entropy = -(shares * shares.log()).sum().item()

    def both(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        price, kind = model(batch[0])
        return F.mse_loss(price, batch[1]), F.cross_entropy(kind, batch[2])

    def measure(model: nn.Module, data: Batch) -> float:
        price, kind = both(model, data)
        return (price.item() / spread + kind.item() / entropy) / 2

    return Setup(TwoHeads(15, 5), splits, lambda net, batch: torch.stack(both(net, batch)).sum(), measure, chance=1.0)


TASKS = (batch_of_one, batch_of_1024_two_scales)
