"""Signals over time: a strided convolution in one dimension, and a small block that is applied eight times."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt.lab.suite.data import generator, split
from ddpnopt.lab.suite.fully_connected import classifier
from ddpnopt.lab.suite.task import Setup, Splits, suite_task


def tones(number: int = 3500, length: int = 64) -> Splits:
    """A tone in one of six neighbouring bands, with a louder slow wave and noise."""
    source = generator(83)
    label = torch.randint(6, (number,), generator=source)
    time = torch.arange(length) / length

    def wave(cycles: Tensor) -> Tensor:
        phase = torch.rand(number, 1, generator=source)
        return torch.sin(2 * torch.pi * (cycles[:, None] * time + phase))

    band = 5 + 2.5 * label + 2 * torch.rand(number, generator=source)
    slow = 0.5 + 2 * torch.rand(number, generator=source)
    x = wave(band) + 1.5 * wave(slow) + 1.4 * torch.randn(number, length, generator=source)
    return split((x[:, None], label), 500, 800)


@suite_task("convolutional", "accuracy %", "higher", steps=250, batch_size=40)
def tones_1d() -> Setup:
    """Three convolutions over time, the first two strided, with batch norm."""
    model = nn.Sequential(
        nn.Conv1d(1, 16, 9, stride=2, padding=4),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.Conv1d(16, 32, 5, stride=2, padding=2),
        nn.BatchNorm1d(32),
        nn.ReLU(),
        nn.Conv1d(32, 32, 3, padding=1),
        nn.BatchNorm1d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(32, 6),
    )
    return classifier(model, tones())


class Flow(nn.Module):
    """Eight Euler steps of a differential equation, all with the same two layers."""

    def __init__(self, inputs: int, classes: int, width: int = 32) -> None:
        super().__init__()
        self.lift = nn.Linear(inputs, width)
        self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.lift(x)
        for _ in range(8):
            h = h + self.second(F.softplus(self.first(h))) / 8
        return self.head(h)


@suite_task("residual", "accuracy %", "higher", steps=600, batch_size=64)
def shared_layer_8() -> Setup:
    """Which of four interleaved sectors, twisted with the radius, a point lies in."""
    source = generator(84)
    x = 2 * torch.rand(3000, 2, generator=source) - 1
    radius, angle = x.norm(dim=1), torch.atan2(x[:, 1], x[:, 0])
    turns = angle / (2 * torch.pi) + 0.8 * radius + 0.02 * torch.randn(3000, generator=source)
    return classifier(Flow(2, 4), split((x, (4 * turns).floor().long() % 4), 500, 800))


TASKS = (tones_1d, shared_layer_8)
