"""Three pictures per batch, 2,048 rows per batch, and four small batches whose gradients are added."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt.lab.suite.data import generator, split
from ddpnopt.lab.suite.measures import accuracy, majority_accuracy
from ddpnopt.lab.suite.raw_units import area_under_curve
from ddpnopt.lab.suite.task import Batch, Setup, Splits, suite_task
from ddpnopt.lab.suite.time_and_motion import heartbeats


def vessels(number: int = 700, size: int = 20) -> Splits:
    """Three thin winding lines each, on a mottled ground with some dots, and which pixels they cover."""
    source = generator(182)
    lines, points = 3, 40
    start = size * torch.rand(number, lines, 1, 2, generator=source)
    angle = 6.3 * torch.rand(number, lines, 1, generator=source)
    angle = angle + (0.25 * torch.randn(number, lines, points, generator=source)).cumsum(2)
    way = start + 0.6 * torch.stack([angle.cos(), angle.sin()], 3).cumsum(2)
    axis = torch.arange(size, dtype=torch.float32)
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), 2).view(1, -1, 2)
    distance = torch.cdist(grid.expand(number, -1, -1), way.flatten(1, 2)).amin(2)
    mask = (distance < 0.8).float().view(number, 1, size, size)
    dots = (torch.rand(number, 1, size, size, generator=source) < 0.04).float()
    ground = F.interpolate(torch.randn(number, 1, 5, 5, generator=source), size=size, mode="bilinear")
    x = torch.maximum(mask, dots) + 0.5 * ground + 0.3 * torch.randn(mask.shape, generator=source)
    return split((x, mask), 100, 200)


class VesselNet(nn.Module):
    """Down once and up again with a shortcut, group norm throughout."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()

        def stage(inputs: int, outputs: int) -> nn.Sequential:
            return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.ReLU())

        self.fine, self.coarse = stage(1, width), stage(width, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.joined, self.out = stage(2 * width, width), nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.fine(x)
        return self.out(self.joined(torch.cat([fine, self.up(self.coarse(F.max_pool2d(fine, 2)))], 1)))


def dice(found: Tensor, mask: Tensor) -> Tensor:
    """Overlap of each picture: twice the common mass over the sum of both."""
    both = (found * mask).sum((1, 2, 3))
    return (2 * both + 1) / (found.sum((1, 2, 3)) + mask.sum((1, 2, 3)) + 1)


@suite_task("batch size", "overlap %", "higher", steps=400, batch_size=3, sealed=True)
def batch_of_three() -> Setup:
    """Thin vessels, three pictures per batch: Dice's overlap per picture plus the cross-entropy."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x, mask = batch
        logits = model(x)
        return 1 - dice(torch.sigmoid(logits), mask).mean() + F.binary_cross_entropy_with_logits(logits, mask)

    def measure(model: nn.Module, data: Batch) -> float:
        return 100 * dice((model(data[0]) > 0).float(), data[1]).mean().item()

    splits = vessels()
    chance = 100 * dice(torch.ones_like(splits.test[1]), splits.test[1]).mean().item()
    return Setup(VesselNet(), splits, loss, measure, chance)


def collisions(number: int = 24000) -> Splits:
    """Three particles with a direction and an energy; in half of the cases two of them stem from a heavier one."""
    source = generator(183)
    signal = torch.rand(number, generator=source) < 0.5
    energy = torch.empty(number, 3).exponential_(generator=source) + 0.3
    direction = F.normalize(torch.randn(number, 3, 3, generator=source), dim=2)
    opened = 1 - 0.9 / (2 * energy[:, 0] * energy[:, 1]) * (1 + 0.3 * torch.randn(number, generator=source))
    opened = opened.clamp(-1, 1)[:, None]
    first = direction[:, 0]
    across = F.normalize(direction[:, 1] - (direction[:, 1] * first).sum(1, keepdim=True) * first, dim=1)
    decayed = opened * first + (1 - opened**2).clamp_min(0).sqrt() * across
    direction[:, 1] = torch.where(signal[:, None], decayed, direction[:, 1])
    momentum = energy[:, :, None] * direction
    x = torch.cat([momentum.flatten(1), energy, energy.log()], 1)
    x = x + 0.03 * torch.randn(x.shape, generator=source)
    return split((x, signal.float()), 2000, 4000)


@suite_task("batch size", "AUC %", "higher", steps=250, batch_size=2048, sealed=True)
def batch_of_2048() -> Setup:
    """Signal or background of collisions, from momenta; a network with batch norm and 2,048 rows per batch."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(batch[0])[:, 0], batch[1])

    layers: list[nn.Module] = []
    for inputs in (15, 64, 64):
        layers += [nn.Linear(inputs, 64), nn.BatchNorm1d(64), nn.ReLU()]
    return Setup(nn.Sequential(*layers, nn.Linear(64, 1)), collisions(), loss, area_under_curve, chance=50.0)


@suite_task("batch size", "accuracy %", "higher", steps=200, batch_size=64, sealed=True)
def four_times_sixteen() -> Setup:
    """Heartbeats in batches of 64, of which the network, which has batch norm, sees 16 at a time."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        parts = zip(batch[0].split(16), batch[1].split(16), strict=True)
        return torch.stack([F.cross_entropy(model(x), y) for x, y in parts]).mean()

    layers: list[nn.Module] = []
    for inputs, outputs in ((1, 16), (16, 24), (24, 24)):
        layers += [nn.Conv1d(inputs, outputs, 7, 2, padding=3), nn.BatchNorm1d(outputs), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(24 * 12, 5))
    splits = heartbeats()
    return Setup(model, splits, loss, accuracy, majority_accuracy(splits.test[1]))


TASKS = (batch_of_three, batch_of_2048, four_times_sixteen)
