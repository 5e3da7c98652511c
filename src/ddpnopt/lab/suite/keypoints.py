"""Where is it: coordinates of an object in a picture, with Huber's loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt.lab.suite.data import generator, split
from ddpnopt.lab.suite.measures import error_of_mean, squared_error
from ddpnopt.lab.suite.task import Batch, Setup, Splits, suite_task


def ring_among_discs(number: int = 2600, size: int = 20) -> Splits:
    """A ring and two discs in noise; the target is the ring's centre in [-1, 1], and one in fifty is wrong."""
    source = generator(87)
    axis = torch.linspace(-1, 1, size)
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), 2)
    centre = 1.5 * torch.rand(number, 3, 2, generator=source) - 0.75
    radius = 0.2 + 0.1 * torch.rand(number, 3, 1, 1, generator=source)
    distance = (grid - centre[:, :, None, None]).norm(dim=4)
    disc = (distance < radius).float()
    hole = (distance[:, 0] < 0.55 * radius[:, 0]).float()
    x = torch.maximum(disc[:, 0] - hole, torch.maximum(disc[:, 1], disc[:, 2]))
    x = x + 0.2 * torch.randn(number, size, size, generator=source)
    splits = split((x[:, None], centre[:, 0]), 300, 500)
    inputs, target = splits.train
    wrong = torch.rand(len(target), 1, generator=source) < 0.02
    target = torch.where(wrong, 2 * torch.rand(target.shape, generator=source) - 1, target)
    return Splits((inputs, target), splits.validation, splits.test)


class HeatMap(nn.Module):
    """Four convolutions to a map whose softmax is the weight of each place; the answer is the mean place."""

    def __init__(self, size: int, width: int = 16) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ELU(),
            nn.Conv2d(width, width, 3, stride=2, padding=1),
            nn.ELU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ELU(),
            nn.Conv2d(width, 1, 3, padding=1),
        )
        axis = torch.linspace(-1, 1, size)[::2] + 1 / (size - 1)
        self.grid: Tensor
        self.register_buffer("grid", torch.stack(torch.meshgrid(axis, axis, indexing="ij"), 2).flatten(0, 1))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.body(x).flatten(1).softmax(1)
        return weight @ self.grid


@suite_task("dense prediction", "squared error", "lower", steps=350, batch_size=32)
def keypoint_heat_map() -> Setup:
    """The ring's centre as the mean of a heat map."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x, y = batch
        return F.huber_loss(model(x), y, delta=0.1)

    splits = ring_among_discs()
    return Setup(HeatMap(20), splits, loss, squared_error, error_of_mean(splits.train[1], splits.test[1]))


TASKS = (keypoint_heat_map,)
