"""Pictures made by rules: textures of cellular automata for a DenseNet, polygons and stars for an EfficientNet."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ddpnopt.lab.suite.data import generator, split
from ddpnopt.lab.suite.fully_connected import classifier
from ddpnopt.lab.suite.task import Setup, Splits, suite_task

# Wolfram's numbers of automata whose pictures differ in their small triangles.
RULES = (18, 22, 30, 45, 60, 90, 110, 150)


def automata(number: int = 3600, size: int = 12) -> Splits:
    """Each row follows from the one above by one of eight rules; one cell in ten is then turned over."""
    source = generator(157)
    label = torch.randint(len(RULES), (number,), generator=source)
    table = torch.tensor([[rule >> k & 1 for k in range(8)] for rule in RULES])
    row = torch.randint(2, (number, size), generator=source)
    rows = []
    for _ in range(8 + size):
        row = table[label].gather(1, 4 * row.roll(1, 1) + 2 * row + row.roll(-1, 1))
        rows.append(row)
    x = torch.stack(rows[8:], 1)
    x = torch.where(torch.rand(x.shape, generator=source) < 0.1, 1 - x, x)
    return split((2 * x[:, None].float() - 1, label), 500, 1000)


class DenseLayer(nn.Module):
    """Normalises and filters all that came before, and puts the result beside it."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(inputs), nn.ReLU(), nn.Conv2d(inputs, growth, 3, padding=1, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.body(x)], 1)


@suite_task("convolutional", "accuracy %", "higher", steps=250, batch_size=32, sealed=True)
def densenet_automata() -> Setup:
    """Which rule has made the picture: two dense blocks of three layers each."""
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1, bias=False),
        *[DenseLayer(12 + 6 * k, 6) for k in range(3)],
        nn.BatchNorm2d(30),
        nn.ReLU(),
        nn.Conv2d(30, 15, 1, bias=False),
        nn.AvgPool2d(2),
        *[DenseLayer(15 + 6 * k, 6) for k in range(3)],
        nn.BatchNorm2d(33),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(33, 8),
    )
    return classifier(model, automata())


def polygons(number: int = 4000, size: int = 16) -> Splits:
    """Polygons and stars of three, four and six corners, lighter than their ground, with noise."""
    source = generator(158)
    label = torch.randint(6, (number,), generator=source)
    corners, star = torch.tensor([3, 4, 6])[label % 3][:, None, None], (label > 2)[:, None, None]
    axis = torch.linspace(-1, 1, size)
    centre = 0.4 * torch.rand(number, 2, 1, 1, generator=source) - 0.2
    down, right = axis[None, :, None] - centre[:, 0], axis[None, None, :] - centre[:, 1]
    sector = 2 * torch.pi / corners
    turn = 2 * torch.pi * torch.rand(number, 1, 1, generator=source)
    angle = (torch.atan2(down, right) + turn).remainder(sector) - sector / 2
    edge = torch.where(star, 0.35 + 0.65 * (2 * angle.abs() / sector), torch.cos(sector / 2) / angle.cos())
    radius = 0.65 + 0.2 * torch.rand(number, 1, 1, generator=source)
    inside = (torch.hypot(down, right) < radius * edge).float()[:, None]
    ink, ground = (torch.rand(number, 3, 1, 1, generator=source) - 0.5 for _ in range(2))
    noise = 0.2 * torch.randn(number, 3, size, size, generator=source)
    x = ground + inside * (1 + ink) + noise
    return split((x, label), 500, 1000)


class MobileBlock(nn.Module):
    """EfficientNet's block: widen, filter each channel, weigh the channels by their means, narrow, add."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int = 3) -> None:
        super().__init__()
        inner = expansion * inputs
        self.widen = nn.Sequential(nn.Conv2d(inputs, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.SiLU())
        self.filter = nn.Sequential(
            nn.Conv2d(inner, inner, 3, stride, padding=1, groups=inner, bias=False), nn.BatchNorm2d(inner), nn.SiLU()
        )
        self.weigh = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(inner, 6, 1), nn.SiLU(), nn.Conv2d(6, inner, 1), nn.Sigmoid()
        )
        self.narrow = nn.Sequential(nn.Conv2d(inner, outputs, 1, bias=False), nn.BatchNorm2d(outputs))
        self.same = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        h = self.filter(self.widen(x))
        h = self.narrow(h * self.weigh(h))
        return x + h if self.same else h


@suite_task("residual", "accuracy %", "higher", steps=300, batch_size=32, sealed=True)
def efficientnet_polygons() -> Setup:
    """How many corners, and polygon or star: SiLU, squeeze and excitation, dropout before the last layer."""
    model = nn.Sequential(
        nn.Conv2d(3, 12, 3, 2, padding=1, bias=False),
        nn.BatchNorm2d(12),
        nn.SiLU(),
        MobileBlock(12, 12, 1),
        MobileBlock(12, 20, 2),
        MobileBlock(20, 20, 1),
        nn.Conv2d(20, 48, 1, bias=False),
        nn.BatchNorm2d(48),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(48, 6),
    )
    return classifier(model, polygons())


TASKS = (densenet_automata, efficientnet_polygons)
