"""Fully connected networks on tables: layer norm on mixed columns, twelve layers of SELU, two rows per batch."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from sklearn.datasets import make_friedman1, make_gaussian_quantiles
from torch import Tensor, nn

from ddpnopt.lab.suite.data import generator, split
from ddpnopt.lab.suite.fully_connected import classifier, dense
from ddpnopt.lab.suite.measures import error_of_mean, squared_error
from ddpnopt.lab.suite.task import Batch, Setup, Splits, suite_task


def land_cover(number: int = 7000) -> Splits:
    """Seven unequal classes from ten measured columns of different scale and 44 columns of two one-hot codes."""
    source = generator(80)
    z = torch.randn(number, 10, generator=source)
    area = (z[:, :3] @ torch.randn(3, 4, generator=source) + torch.randn(number, 4, generator=source)).argmax(1)
    soil = (z[:, 2:7] @ torch.randn(5, 40, generator=source) + torch.randn(number, 40, generator=source)).argmax(1)
    codes = torch.cat([F.one_hot(area, 4), F.one_hot(soil, 40)], 1).float()
    first, second = torch.randn(54, 32, generator=source) / 3, torch.randn(32, 7, generator=source)
    scores = torch.tanh(torch.cat([z, 2 * codes], 1) @ first) @ second
    scores = scores + torch.linspace(1.5, -1.5, 7) + 0.3 * torch.randn(number, 7, generator=source)
    measured = z * torch.logspace(-1, 1, 10)
    return split((torch.cat([measured, codes], 1), scores.argmax(1)), 800, 1200)


@suite_task("fully connected", "accuracy %", "higher", steps=500, batch_size=128)
def layer_norm_table() -> Setup:
    """Three hidden layers of GELU and layer norm; the columns differ in scale by a factor of 100."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((54, 96), (96, 96), (96, 96)):
        layers += [nn.Linear(inputs, outputs), nn.LayerNorm(outputs), nn.GELU()]
    return classifier(nn.Sequential(*layers, nn.Linear(96, 7)), land_cover())


@suite_task("plain deep", "accuracy %", "higher", steps=500, batch_size=100)
def deep_selu_12() -> Setup:
    """Twelve layers of SELU, initialised to keep the variance; the classes are shells of a Gaussian."""
    x, y = make_gaussian_quantiles(n_samples=5000, n_features=8, n_classes=5, random_state=81)
    model = dense([8, *[40] * 11, 5], nn.SELU)
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=1 / math.sqrt(layer.in_features))
            nn.init.zeros_(layer.bias)
    return classifier(model, split((torch.tensor(x, dtype=torch.float32), torch.tensor(y)), 600, 1000))


@suite_task("batch size", "squared error", "lower", steps=1500, batch_size=2)
def batch_of_two() -> Setup:
    """Friedman's function of five of ten columns, two rows per batch."""
    x, y = make_friedman1(n_samples=2000, n_features=10, noise=0.5, random_state=82)
    target = torch.tensor((y - y.mean()) / y.std(), dtype=torch.float32)[:, None]
    splits = split((torch.tensor(2 * x - 1, dtype=torch.float32), target), 300, 500)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        inputs, wanted = batch
        return F.mse_loss(model(inputs), wanted)

    chance = error_of_mean(splits.train[1], splits.test[1])
    return Setup(dense([10, 48, 48, 1], nn.SiLU), splits, loss, squared_error, chance)


TASKS = (layer_norm_table, deep_selu_12, batch_of_two)
