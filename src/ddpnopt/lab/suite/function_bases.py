"""Networks that see functions of their inputs: learned curves on every edge (KAN), waves of random frequency."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt.lab.suite.data import generator, split
from ddpnopt.lab.suite.fully_connected import classifier, dense
from ddpnopt.lab.suite.measures import digits_of_error, error_of_mean
from ddpnopt.lab.suite.regression import mean_squared_error
from ddpnopt.lab.suite.task import Setup, Splits, suite_task


class CurveLayer(nn.Module):
    """A curve from each input to each output, a sum of bumps on a grid, beside an ordinary layer of SiLU."""

    def __init__(self, inputs: int, outputs: int, bumps: int = 8) -> None:
        super().__init__()
        self.grid: Tensor
        self.register_buffer("grid", torch.linspace(-1.5, 1.5, bumps))
        self.curves = nn.Linear(inputs * bumps, outputs, bias=False)
        self.base = nn.Linear(inputs, outputs)
        nn.init.normal_(self.curves.weight, std=0.1 / math.sqrt(inputs))

    def forward(self, x: Tensor) -> Tensor:
        width = self.grid[1] - self.grid[0]
        bumps = torch.exp(-(((x[:, :, None] - self.grid) / width) ** 2))
        return self.curves(bumps.flatten(1)) + self.base(F.silu(x))


def interference(number: int = 4000) -> Splits:
    """Brightness of two overlapping waves from their intensities, their phase and the coherence of the light."""
    source = generator(150)
    x = 2 * torch.rand(number, 4, generator=source) - 1
    first, second = 2 + 1.5 * x[:, 0], 2 + 1.5 * x[:, 1]
    coherence = torch.exp(-((x[:, 3] + 1) ** 2))
    y = first + second + 2 * (first * second).sqrt() * coherence * torch.cos(1.5 * torch.pi * x[:, 2])
    return split((x, ((y - 4) / 2.5)[:, None]), 500, 1000)


@suite_task("fully connected", "-log10 error", "higher", steps=600, batch_size=64, sealed=True)
def kan_formula() -> Setup:
    """A formula of physics without noise from its values, by three layers of learned curves."""
    splits = interference()
    model = nn.Sequential(CurveLayer(4, 12), CurveLayer(12, 12), CurveLayer(12, 1))
    chance = -math.log10(error_of_mean(splits.train[1], splits.test[1]))
    return Setup(model, splits, mean_squared_error, digits_of_error, chance)


class RandomWaves(nn.Module):
    """Sines and cosines of the inputs with fixed random frequencies."""

    def __init__(self, inputs: int, waves: int, frequency: float) -> None:
        super().__init__()
        self.frequencies: Tensor
        self.register_buffer("frequencies", frequency * torch.randn(inputs, waves))

    def forward(self, x: Tensor) -> Tensor:
        angle = 2 * torch.pi * x @ self.frequencies
        return torch.cat([angle.sin(), angle.cos()], 1)


@suite_task("fully connected", "accuracy %", "higher", steps=500, batch_size=64, sealed=True)
def fourier_features() -> Setup:
    """A map of 150 districts in five colours, by the place; one colour in twenty is wrong in the training data."""
    source = generator(151)
    towns, colour = torch.rand(150, 2, generator=source), torch.randint(5, (150,), generator=source)
    x = torch.rand(6000, 2, generator=source)
    label = colour[torch.cdist(x, towns).argmin(1)]
    splits = split((x, label), 800, 1500)
    place, right = splits.train
    wrong = torch.rand(len(right), generator=source) < 0.05
    given = torch.where(wrong, torch.randint(5, right.shape, generator=source), right)
    model = nn.Sequential(RandomWaves(2, 32, 2.5), dense([64, 96, 96, 5]))
    return classifier(model, Splits((place, given), splits.validation, splits.test))


TASKS = (kan_formula, fourier_features)
