"""Fully connected layers of other forms: gates, highways, directions and lengths of weights apart."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sklearn.datasets import make_classification, make_swiss_roll
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from ddpnopt.lab.suite.data import flat_digits, generator, split
from ddpnopt.lab.suite.fully_connected import classifier
from ddpnopt.lab.suite.measures import error_of_mean, squared_error
from ddpnopt.lab.suite.regression import mean_squared_error
from ddpnopt.lab.suite.task import Setup, Splits, suite_task


class SwiGLU(nn.Module):
    """One layer opens and closes what another one lets through; the result is added to the normalised input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate, self.up, self.down = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


@suite_task("fully connected", "accuracy %", "higher", steps=500, batch_size=80)
def swiglu_table() -> Setup:
    """Six classes of three clusters each in a table of 24 columns, of which 12 matter, in three gated blocks."""
    x, y = make_classification(
        12000, 24, n_informative=12, n_redundant=4, n_classes=6, n_clusters_per_class=3, flip_y=0.03, random_state=120
    )
    model = nn.Sequential(nn.Linear(24, 64), *[SwiGLU(64) for _ in range(3)], nn.Linear(64, 6))
    return classifier(model, split((torch.tensor(x, dtype=torch.float32), torch.tensor(y)), 600, 1000))


def unrolled(number: int = 3500) -> Splits:
    """Points of a rolled sheet, turned into eight dimensions, with noise; the target is where on the sheet they lie."""
    x, along = make_swiss_roll(number, noise=0.05, random_state=121)
    source = generator(121)
    turn, _ = torch.linalg.qr(torch.randn(8, 8, generator=source))
    points = torch.tensor(x, dtype=torch.float32)
    place = torch.stack([torch.tensor(along, dtype=torch.float32) / 4.7 - 2, points[:, 1] / 10 - 1], 1)
    return split((points / 8 @ turn[:3] + 0.01 * torch.randn(number, 8, generator=source), place), 500, 800)


@suite_task("plain deep", "squared error", "lower", steps=600, batch_size=64)
def deep_weight_norm_9() -> Setup:
    """Nine layers of leaky ReLU whose weights have length and direction apart: unroll a sheet."""
    layers: list[nn.Module] = [weight_norm(nn.Linear(8, 48)), nn.LeakyReLU(0.1)]
    for _ in range(7):
        layers += [weight_norm(nn.Linear(48, 48)), nn.LeakyReLU(0.1)]
    model = nn.Sequential(*layers, nn.Linear(48, 2))
    splits = unrolled()
    return Setup(model, splits, mean_squared_error, squared_error, error_of_mean(splits.train[1], splits.test[1]))


class Highway(nn.Module):
    """Each number is carried on or replaced, as a gate says that is mostly closed at first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.new, self.gate = nn.Linear(width, width), nn.Linear(width, width)
        nn.init.constant_(self.gate.bias, -2.0)

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.gate(x))
        return gate * torch.relu(self.new(x)) + (1 - gate) * x


@suite_task("residual", "accuracy %", "higher", steps=400, batch_size=50)
def highway_12() -> Setup:
    """Noisy digits through twelve highway layers."""
    model = nn.Sequential(nn.Linear(64, 40), *[Highway(40) for _ in range(12)], nn.Linear(40, 10))
    return classifier(model, flat_digits(0.25))


TASKS = (swiglu_table, deep_weight_norm_9, highway_12)
