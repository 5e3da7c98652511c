"""Deep stacks of other layers: the larger of two, layers that cannot stretch, blocks that begin as nothing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from ddpnopt.lab.suite.data import generator, split
from ddpnopt.lab.suite.measures import error_of_mean, squared_error
from ddpnopt.lab.suite.regression import mean_squared_error
from ddpnopt.lab.suite.task import Batch, Setup, Splits, suite_task


def waveforms(number: int = 6500) -> Splits:
    """Breiman's waveforms: each class mixes two of three triangles at 21 times, with noise and 19 columns of noise."""
    source = generator(154)
    label = torch.randint(3, (number,), generator=source)
    time = torch.arange(21.0)
    triangles = torch.stack([(6 - (time - centre).abs()).clamp_min(0) for centre in (6, 14, 10)])
    share = torch.rand(number, 1, generator=source)
    mixed = share * triangles[label] + (1 - share) * triangles[(label + 1) % 3]
    x = F.pad(mixed, (0, 19)) + torch.randn(number, 40, generator=source)
    return split((x / 2, label), 1000, 2000)


class Maxout(nn.Module):
    """Each output is the larger of two linear functions."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, 2 * outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).unflatten(1, (-1, 2)).amax(2)


@suite_task("plain deep", "nats", "lower", steps=300, batch_size=64, sealed=True)
def deep_maxout_6() -> Setup:
    """Six layers of maxout on waveforms, of which the best possible classifier knows about 86 of 100."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    model = nn.Sequential(Maxout(40, 32), *[Maxout(32, 32) for _ in range(5)], nn.Linear(32, 3))
    splits = waveforms()
    shares = splits.test[1].bincount() / len(splits.test[1])
    return Setup(model, splits, loss, lambda net, data: loss(net, data).item(), -(shares * shares.log()).sum().item())


def distance_to_things(x: Tensor) -> Tensor:
    """How far a point of space is from a ring, a ball and a box; negative inside of one."""
    ring = torch.hypot(torch.hypot(x[:, 0] + 0.3, x[:, 1]) - 0.45, x[:, 2]) - 0.15
    ball = (x - torch.tensor([0.5, 0.5, 0.3])).norm(dim=1) - 0.3
    out = (x - torch.tensor([0.5, -0.5, -0.2])).abs() - torch.tensor([0.2, 0.3, 0.4])
    box = out.clamp_min(0).norm(dim=1) + out.amax(1).clamp_max(0)
    return torch.stack([ring, ball, box], 1).amin(1)


@suite_task("plain deep", "absolute error", "lower", steps=400, batch_size=64, sealed=True)
def deep_spectral_norm_7() -> Setup:
    """Signed distances to three things, by seven layers with spectral norm and a last one that is free."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.l1_loss(model(batch[0])[:, 0], batch[1])

    x = 2 * torch.rand(8000, 3, generator=generator(155)) - 1
    splits = split((x, distance_to_things(x)), 1000, 2000)
    layers: list[nn.Module] = []
    for inputs in (3, *[48] * 6):
        layers += [spectral_norm(nn.Linear(inputs, 48)), nn.LeakyReLU(0.2)]
    model = nn.Sequential(*layers, nn.Linear(48, 1))
    chance = (splits.test[1] - splits.train[1].median()).abs().mean().item()
    return Setup(model, splits, loss, lambda net, data: loss(net, data).item(), chance)


def robot_of_eight_links(number: int = 6000) -> Splits:
    """How far the hand of an arm of eight links is from a point, by its angles, with noise."""
    source = generator(156)
    x = 2 * torch.rand(number, 8, generator=source) - 1
    angle = (1.2 * x).cumsum(1)
    hand = torch.stack([angle.cos().sum(1), angle.sin().sum(1)], 1) / 4
    y = (hand - torch.tensor([0.8, 0.4])).norm(dim=1) + 0.02 * torch.randn(number, generator=source)
    return split((x, ((y - y.mean()) / y.std())[:, None]), 800, 1500)


class FromNothing(nn.Module):
    """A block that adds its layers with a learned weight, which is zero at first (ReZero)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight * self.body(x)


@suite_task("residual", "squared error", "lower", steps=400, batch_size=64, sealed=True)
def rezero_8() -> Setup:
    """Eight blocks that are nothing at first: where the hand of an arm is."""
    splits = robot_of_eight_links()
    model = nn.Sequential(nn.Linear(8, 48), *[FromNothing(48) for _ in range(8)], nn.Linear(48, 1))
    return Setup(model, splits, mean_squared_error, squared_error, error_of_mean(splits.train[1], splits.test[1]))


TASKS = (deep_maxout_6, deep_spectral_norm_7, rezero_8)
