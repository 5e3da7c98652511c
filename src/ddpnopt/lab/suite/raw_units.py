"""Tables as they come, in the units of their columns: years and millimetres of mercury, prices in thousands."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

from ddpnopt.lab.suite.data import generator, split
from ddpnopt.lab.suite.fully_connected import dense
from ddpnopt.lab.suite.task import Batch, Setup, Splits, suite_task


def patients(number: int = 7000) -> Splits:
    """Age, sex, pressure, cholesterol, sugar, pulse, weight, height, smoking, exercise; a sixth or so falls ill."""
    source = generator(152)

    def normal(mean: float, deviation: float) -> Tensor:
        return mean + deviation * torch.randn(number, generator=source)

    age, sex = 20 + 65 * torch.rand(number, generator=source), torch.rand(number, generator=source).round()
    height = normal(165, 7) + 12 * sex
    weight = (height / 100) ** 2 * (normal(25, 4) + 0.03 * (age - 50))
    smokes = (torch.rand(number, generator=source) < 0.3).float()
    exercise = torch.empty(number).exponential_(0.5, generator=source)
    pressure = normal(95, 12) + 0.6 * age + 0.2 * (weight - 70)
    cholesterol, sugar, pulse = normal(190, 35) + 0.3 * age, normal(5.4, 0.9), normal(72, 10) - 2 * exercise
    risk = 0.06 * (age - 62) + 0.03 * (pressure - 130) + 0.02 * (cholesterol - 200) * (age > 45)
    risk = risk + smokes * (0.5 + 0.03 * (age - 40)) + 0.8 * (sugar - 6.5).clamp_min(0) - 0.3 * exercise + 0.5 * sex
    ill = (torch.rand(number, generator=source) < torch.sigmoid(1.5 * (risk - 1.2))).float()
    columns = [age, sex, pressure, cholesterol, sugar, pulse, weight, height, smokes, exercise]
    return split((torch.stack(columns, 1), ill), 1000, 2000)


def area_under_curve(model: nn.Module, data: Batch) -> float:
    """How often a positive sample has the higher score of a pair, in percent."""
    score = model(data[0])[:, 0].double()
    if not torch.isfinite(score).all():
        return math.nan
    return 100 * float(roc_auc_score(data[1].numpy(), score.numpy()))


@suite_task("fully connected", "AUC %", "higher", steps=600, batch_size=32, sealed=True)
def raw_medical_table() -> Setup:
    """Who falls ill, from columns of 0 or 1 and of some hundreds, which nobody has standardised; with dropout."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(batch[0])[:, 0], batch[1])

    model = nn.Sequential(
        nn.Linear(10, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1)
    )
    return Setup(model, patients(), loss, area_under_curve, chance=50.0)


def houses(number: int = 6000) -> Splits:
    """District, and area, rooms, year, distance and garden about their means; the price in thousands."""
    source = generator(153)
    district = torch.multinomial(1 / torch.arange(3.0, 28), number, replacement=True, generator=source)
    x = torch.randn(number, 5, generator=source)
    x[:, 1] = 0.8 * x[:, 0] + 0.6 * x[:, 1]
    level = 0.35 * torch.randn(25, generator=source)[district]
    area = 110 * torch.exp(0.35 * x[:, 0])
    worth = torch.exp(level - 0.15 * x[:, 3] + 0.1 * (x[:, 2] > 0.5) + 0.05 * x[:, 1] * x[:, 4].clamp_min(0))
    price = 2.8 * area * worth + 15 * x[:, 4] + 25 * torch.randn(number, generator=source)
    return split((district, x, price), 800, 1500)


class HouseNet(nn.Module):
    """A vector of the district beside the numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.district = nn.Embedding(25, 4)
        self.body = dense([9, 64, 64, 1])

    def forward(self, district: Tensor, x: Tensor) -> Tensor:
        return self.body(torch.cat([self.district(district), x], 1))[:, 0]


@suite_task("regression", "absolute error", "lower", steps=900, batch_size=64, sealed=True)
def prices_in_thousands() -> Setup:
    """The squared error of prices of some hundreds of thousands, as they stand in the table."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        district, x, price = batch
        return F.mse_loss(model(district, x), price)

    def measure(model: nn.Module, data: Batch) -> float:
        return (model(*data[:2]) - data[2]).abs().mean().item()

    splits = houses()
    chance = (splits.test[2] - splits.train[2].mean()).abs().mean().item()
    return Setup(HouseNet(), splits, loss, measure, chance)


TASKS = (raw_medical_table, prices_in_thousands)
