"""Convolutions: dilated in time with gates, of several sizes side by side, in groups with mixed labels."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt.lab.suite.data import draw_shape, generator, split, stripes
from ddpnopt.lab.suite.fully_connected import classifier
from ddpnopt.lab.suite.measures import accuracy, majority_accuracy
from ddpnopt.lab.suite.task import Batch, Setup, Splits, suite_task

LEVELS = 24


@lru_cache
def chaotic_series(number: int = 1500, length: int = 64) -> tuple[Splits, float]:
    """Mackey and Glass's delayed equation from random states, in 24 levels; chance is their frequencies."""
    source = generator(122)
    delay, skip = 17, 100
    past = [0.6 + 0.8 * torch.rand(number, generator=source) for _ in range(delay + 1)]
    for _ in range(skip + 2 * length + 2):
        old = past[-delay - 1]
        past.append(0.9 * past[-1] + 0.2 * old / (1 + old**10))
    series = torch.stack(past[-2 * length - 2 :: 2], 1) + 0.02 * torch.randn(number, length + 1, generator=source)
    codes = ((series - 0.3) / 1.1 * LEVELS).long().clamp(0, LEVELS - 1)
    splits = split((codes[:, :-1].contiguous(), codes[:, 1:].contiguous()), 150, 250)
    counts = splits.train[1].flatten().bincount(minlength=LEVELS).double() + 1
    return splits, -(counts / counts.sum()).log()[splits.test[1]].mean().item()


class Dilated(nn.Module):
    """WaveNet's layer: two causal filters, one of them a gate; part goes on except in the last, part is heard."""

    def __init__(self, width: int, dilation: int, last: bool) -> None:
        super().__init__()
        self.dilation = dilation
        self.filters = nn.Conv1d(width, 2 * width, 2, dilation=dilation)
        self.onwards, self.heard = None if last else nn.Conv1d(width, width, 1), nn.Conv1d(width, 2 * width, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        signal, gate = self.filters(F.pad(x, (self.dilation, 0))).chunk(2, 1)
        h = torch.tanh(signal) * torch.sigmoid(gate)
        return x if self.onwards is None else x + self.onwards(h), self.heard(h)


class WaveNet(nn.Module):
    """Five layers of doubling dilation: the next of 24 levels from the last 32."""

    def __init__(self, width: int = 20) -> None:
        super().__init__()
        self.levels = nn.Embedding(LEVELS, width)
        self.layers = nn.ModuleList(Dilated(width, 2**k, last=k == 4) for k in range(5))
        self.hidden, self.head = nn.Conv1d(2 * width, 2 * width, 1), nn.Conv1d(2 * width, LEVELS, 1)

    def forward(self, codes: Tensor) -> Tensor:
        x = self.levels(codes).transpose(1, 2)
        total = torch.zeros(1)
        for layer in self.layers:
            x, heard = layer(x)
            total = total + heard
        return self.head(F.relu(self.hidden(F.relu(total))))


@suite_task("convolutional", "nats", "lower", steps=300, batch_size=16)
def wavenet_series() -> Setup:
    """The next level of a chaotic series."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    splits, chance = chaotic_series()
    return Setup(WaveNet(), splits, loss, lambda net, data: loss(net, data).item(), chance)


class Inception(nn.Module):
    """Filters of three sizes and a pooling side by side, each picture's channels normalised by themselves."""

    def __init__(self, inputs: int, each: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(inputs, each, 1)
        self.three = nn.Sequential(nn.Conv2d(inputs, each, 1), nn.ReLU(), nn.Conv2d(each, each, 3, padding=1))
        self.five = nn.Sequential(nn.Conv2d(inputs, each // 2, 1), nn.ReLU(), nn.Conv2d(each // 2, each, 5, padding=2))
        self.pooled = nn.Sequential(nn.MaxPool2d(3, 1, padding=1), nn.Conv2d(inputs, each, 1))
        self.norm = nn.InstanceNorm2d(4 * each, affine=True)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(torch.cat([self.one(x), self.three(x), self.five(x), self.pooled(x)], 1)))


def textures(number: int = 3600, size: int = 14, classes: int = 9) -> Splits:
    """Random fields of nine kinds, three directions times three widths of their waves, and noise on top."""
    source = generator(123)
    label = torch.randint(classes, (number,), generator=source)
    down, right = torch.fft.fftfreq(size)[:, None], torch.fft.fftfreq(size)[None, :]
    angle, scale = torch.pi * (label % 3) / 3, 0.12 + 0.08 * (label // 3)
    along = angle.cos()[:, None, None] * right + angle.sin()[:, None, None] * down
    across = angle.cos()[:, None, None] * down - angle.sin()[:, None, None] * right
    power = torch.exp(-((along.abs() - scale[:, None, None]) ** 2 + 0.5 * across**2) / (2 * 0.06**2))
    white = torch.fft.fft2(torch.randn(number, size, size, generator=source))
    field = torch.fft.ifft2(white * power).real
    x = field / field.std((1, 2), keepdim=True) + 0.5 * torch.randn(number, size, size, generator=source)
    return split((x[:, None], label), 500, 800)


@suite_task("convolutional", "accuracy %", "higher", steps=250, batch_size=32)
def inception_textures() -> Setup:
    """Which of nine textures: two inception blocks with instance norm."""
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        Inception(12, 6),
        Inception(24, 10),
        nn.AdaptiveMaxPool2d(2),
        nn.Flatten(),
        nn.Linear(160, 9),
    )
    return classifier(model, textures())


class Grouped(nn.Module):
    """ResNeXt's block: narrow, filter in eight groups, widen, add."""

    def __init__(self, inputs: int, outputs: int, stride: int, groups: int = 8) -> None:
        super().__init__()
        inner = outputs // 2
        self.body = nn.Sequential(
            nn.Conv2d(inputs, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(),
            nn.Conv2d(inner, inner, 3, stride, padding=1, groups=groups, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(),
            nn.Conv2d(inner, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def shape_before_shape(number: int = 4200, size: int = 14) -> Splits:
    """A bright shape of four kinds over a darker one, striped ground and noise; the label is the bright one's kind."""
    source = generator(124)
    label, behind = torch.randint(4, (2, number), generator=source)
    front, back = draw_shape(label, size, source), draw_shape(behind, size, source)
    ground = stripes(torch.randint(2, (number,), generator=source), size, source)
    light = torch.where(front > 0, 1.0, 0.4 * back + 0.2 * ground)
    return split(((light + 0.2 * torch.randn(number, size, size, generator=source))[:, None], label), 500, 800)


@suite_task("residual", "accuracy %", "higher", steps=300, batch_size=32)
def resnext_mixup() -> Setup:
    """Grouped convolutions with batch norm; pictures and labels of a batch are mixed in pairs (mixup)."""

    def mixed(batch: Batch, source: torch.Generator) -> Batch:
        x, y = batch
        partner = torch.randperm(len(x), generator=source)
        share = 0.5 + 0.5 * torch.rand(len(x), generator=source) ** 0.3
        weight = share[:, None, None, None]
        return weight * x + (1 - weight) * x[partner], y, y[partner], share

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x, first, second, share = batch
        logits = model(x)
        one, other = (F.cross_entropy(logits, y, reduction="none") for y in (first, second))
        return (share * one + (1 - share) * other).mean()

    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        Grouped(16, 32, 2),
        Grouped(32, 48, 2),
        Grouped(48, 48, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(48, 4),
    )
    splits = shape_before_shape()
    return Setup(model, splits, loss, accuracy, majority_accuracy(splits.test[1]), mixed)


TASKS = (wavenet_series, inception_textures, resnext_mixup)
