"""Convolutions over time: dilated ones over a heart's beats, three-dimensional ones over short films."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from ddpnopt.lab.suite.data import generator, split
from ddpnopt.lab.suite.fully_connected import classifier
from ddpnopt.lab.suite.task import Setup, Splits, suite_task


def heartbeats(number: int = 3200, length: int = 96) -> Splits:
    """Beats that are even, with one too early, with one missing, with a broad one, or uneven; noise and slow drift."""
    source = generator(159)
    label = torch.randint(5, (number,), generator=source)
    beats = 9
    interval = 11 + 3 * torch.rand(number, 1, generator=source)
    steps = interval.expand(-1, beats).clone()
    spread = torch.where(label == 4, 0.22, 0.03)[:, None]
    steps = steps * (1 + spread * torch.randn(number, beats, generator=source))
    time = steps.cumsum(1) - interval * torch.rand(number, 1, generator=source) - 10
    chosen = torch.arange(beats) == torch.randint(2, 7, (number, 1), generator=source)
    time = time - 0.35 * interval * (chosen & (label == 1)[:, None])
    height = 1 - (chosen & (label == 2)[:, None]).float()
    width = torch.where(chosen & (label == 3)[:, None], 2.4, 1.1)
    away = (torch.arange(length)[None, None, :] - time[:, :, None]) / width[:, :, None]
    pulse = height[:, :, None] * (1 - 0.6 * away**2) * torch.exp(-0.5 * away**2)
    drift = torch.sin(torch.arange(length) / 25 + 6.3 * torch.rand(number, 1, generator=source))
    x = pulse.sum(1) + 0.2 * drift + 0.08 * torch.randn(number, length, generator=source)
    return split((x[:, None], label), 500, 900)


class TemporalBlock(nn.Module):
    """Two dilated causal convolutions with weight norm and dropout, added to the input."""

    def __init__(self, inputs: int, outputs: int, dilation: int) -> None:
        super().__init__()
        self.padding = (2 * dilation, 0)
        self.first = weight_norm(nn.Conv1d(inputs, outputs, 3, dilation=dilation))
        self.second = weight_norm(nn.Conv1d(outputs, outputs, 3, dilation=dilation))
        self.dropout = nn.Dropout(0.05)
        self.shortcut = nn.Identity() if inputs == outputs else nn.Conv1d(inputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.dropout(F.relu(self.first(F.pad(x, self.padding))))
        h = self.dropout(F.relu(self.second(F.pad(h, self.padding))))
        return F.relu(h + self.shortcut(x))


class TemporalNetwork(nn.Module):
    """Blocks of growing dilation; the answer from the largest values over time."""

    def __init__(self, classes: int, width: int = 16) -> None:
        super().__init__()
        blocks = [TemporalBlock(1 if k == 0 else width, width, 2**k) for k in range(4)]
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x).amax(2))


@suite_task("convolutional", "accuracy %", "higher", steps=400, batch_size=32, sealed=True)
def tcn_heartbeats() -> Setup:
    """What is wrong with a heart: a temporal convolutional network."""
    return classifier(TemporalNetwork(5), heartbeats())


def films(number: int = 2600, frames: int = 6, size: int = 12) -> Splits:
    """A random texture that moves in one of eight directions before another one that stands still, with noise."""
    source = generator(160)
    label = torch.randint(8, (number,), generator=source)
    angle = label * torch.pi / 4
    axis = torch.linspace(-1, 1, size)
    place = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), 2).flip(2)
    ground, thing = torch.randn(2, number, 1, size, size, generator=source)
    centre = 0.4 * (torch.rand(number, 2, generator=source) - 0.5)
    pace = torch.stack([angle.cos(), angle.sin()], 1) * (2 / (size - 1))
    pictures = []
    for time in range(frames):
        moved = centre + pace * (time - (frames - 1) / 2)
        grid = place - moved[:, None, None]
        texture = F.grid_sample(thing, grid, align_corners=True)[:, 0]
        inside = torch.exp(-2 * (grid.norm(dim=3) / 0.7) ** 4)
        pictures.append(inside * texture + (1 - inside) * 0.3 * ground[:, 0])
    x = torch.stack(pictures, 1)[:, None]
    return split((x + 0.2 * torch.randn(x.shape, generator=source), label), 400, 800)


@suite_task("convolutional", "accuracy %", "higher", steps=250, batch_size=24, sealed=True)
def films_3d() -> Setup:
    """Which way something moves: convolutions over time and both directions of the picture, with batch norm."""
    model = nn.Sequential(
        nn.Conv3d(1, 12, 3, padding=1, bias=False),
        nn.BatchNorm3d(12),
        nn.ReLU(),
        nn.MaxPool3d((1, 2, 2)),
        nn.Conv3d(12, 20, 3, padding=1, bias=False),
        nn.BatchNorm3d(20),
        nn.ReLU(),
        nn.MaxPool3d(2),
        nn.Conv3d(20, 24, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
        nn.Linear(24, 8),
    )
    return classifier(model, films())


TASKS = (tcn_heartbeats, films_3d)
