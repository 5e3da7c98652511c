"""Densities without a likelihood: scores of noisy points, data against noise, samples by their projections."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from sklearn.datasets import make_s_curve
from torch import Tensor, nn

from ddpnopt.lab.suite.data import generator, split
from ddpnopt.lab.suite.fully_connected import dense
from ddpnopt.lab.suite.task import Batch, Setup, suite_task

LEAST, MOST = 0.1, 1.5


class ScoreNetwork(nn.Module):
    """The direction to likelier points, for points with noise of a given deviation."""

    def __init__(self, inputs: int, width: int = 96) -> None:
        super().__init__()
        self.body = dense([inputs + 5, width, width, width, inputs], nn.SiLU)

    def forward(self, x: Tensor, deviation: Tensor) -> Tensor:
        level = deviation.log()
        waves = [level, level.sin(), level.cos(), (2 * level).sin(), (2 * level).cos()]
        return self.body(torch.cat([x / (1 + deviation**2).sqrt(), *waves], 1)) / deviation


def with_noise(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Noisy points, the deviation of the noise of each point, and the noise."""
    deviation = LEAST * (MOST / LEAST) ** torch.rand(len(x), 1)
    noise = torch.randn_like(x)
    return x + deviation * noise, deviation, noise


@suite_task("generative", "squared error", "lower", steps=800, batch_size=128, sealed=True)
def score_matching() -> Setup:
    """Denoising score matching of a mixture of twelve clusters; measured against the scores that are known.

    Both loss and metric are in units of the noise; chance is no score at all.
    """
    source = generator(167)
    centres = 1.5 * torch.randn(12, 3, generator=source)
    size, number = 0.15, 8000
    chosen = torch.randint(12, (number,), generator=source)
    splits = split((centres[chosen] + size * torch.randn(number, 3, generator=source),), 1000, 2000)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        noisy, deviation, noise = with_noise(batch[0])
        return (deviation * model(noisy, deviation) + noise).square().mean()

    def true_score(noisy: Tensor, deviation: Tensor) -> Tensor:
        variance = size**2 + deviation**2
        away = centres - noisy[:, None]
        weight = (-away.square().sum(2) / (2 * variance)).softmax(1)
        return (weight[:, :, None] * away).sum(1) / variance

    def error(model: nn.Module | None, data: Batch) -> float:
        noisy, deviation, _ = with_noise(data[0])
        found = torch.zeros_like(noisy) if model is None else model(noisy, deviation)
        return (deviation * (found - true_score(noisy, deviation))).square().mean().item()

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(167)
        chance = error(None, splits.test)
    return Setup(ScoreNetwork(3), splits, loss, error, chance)


class Energy(nn.Module):
    """The logarithm of a density, whose constant is learned as well."""

    def __init__(self, inputs: int, width: int = 64) -> None:
        super().__init__()
        self.body = dense([inputs, width, width, width, 1], nn.ELU)
        self.constant = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)[:, 0] - x.square().sum(1) / 2 - self.constant


@suite_task("generative", "nats", "lower", steps=500, batch_size=128, sealed=True)
def noise_contrastive() -> Setup:
    """Points on two linked rings in four dimensions against as many of a Gaussian, by the energy of each."""
    source = generator(168)
    number = 8000
    angle = 2 * torch.pi * torch.rand(number, generator=source)
    ring = torch.stack([angle.cos(), angle.sin(), 0.5 * (2 * angle).cos(), 0.5 * (3 * angle).sin()], 1)
    other = (torch.rand(number, 1, generator=source) < 0.5).float()
    x = ring * (1 - other) + (ring.flip(1) + torch.tensor([0.5, 0.0, 0.5, 0.0])) * other
    x = x + 0.15 * torch.randn(number, 4, generator=source)
    splits = split((1.4 * x - 0.2,), 1000, 2000)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        (x,) = batch
        noise = torch.randn_like(x)
        known = 2 * math.log(2 * math.pi)
        ratio, wrong = (model(z) + z.square().sum(1) / 2 + known for z in (x, noise))
        return (F.softplus(-ratio) + F.softplus(wrong)).mean()

    return Setup(Energy(4), splits, loss, lambda net, data: loss(net, data).item(), 2 * math.log(2))


def sliced_distance(x: Tensor, y: Tensor, directions: int) -> Tensor:
    """Mean squared distance of the sorted projections of two sets of equal size on random directions."""
    direction = F.normalize(torch.randn(x.shape[1], directions), dim=0)
    return ((x @ direction).sort(0).values - (y @ direction).sort(0).values).square().mean()


@suite_task("generative", "sliced distance", "lower", steps=500, batch_size=256, sealed=True)
def sliced_wasserstein() -> Setup:
    """A network makes points of a curved sheet from noise: batches are compared by random projections.

    The metric is in hundredths of the data's variance; chance is a Gaussian with the data's covariance.
    """
    points, _ = make_s_curve(8000, noise=0.05, random_state=169)
    x = torch.tensor(points, dtype=torch.float32)
    splits = split(((x - x.mean(0)) / x.std(0),), 1500, 3000)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        (x,) = batch
        return sliced_distance(model(torch.randn(len(x), 4)), x, 48)

    def measure(model: nn.Module, data: Batch) -> float:
        (x,) = data
        return 100 * sliced_distance(model(torch.randn(len(x), 4)), x, 200).item()

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(169)
        (x,) = splits.test
        factor = torch.linalg.cholesky(splits.train[0].T.cov())
        chance = 100 * sliced_distance(torch.randn_like(x) @ factor.T, x, 200).item()
    return Setup(dense([4, 64, 64, 64, 3], lambda: nn.LeakyReLU(0.2)), splits, loss, measure, chance)


TASKS = (score_matching, noise_contrastive, sliced_wasserstein)
