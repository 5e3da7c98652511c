"""Photographs as targets: a finer resolution, colours by coordinates."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from sklearn.datasets import load_sample_image
from torch import Tensor, nn

from ddpnopt.lab.suite.data import split
from ddpnopt.lab.suite.generative import decibels, photo_patches
from ddpnopt.lab.suite.measures import squared_error
from ddpnopt.lab.suite.task import Batch, Setup, Splits, suite_task


def clean_patches() -> Splits:
    """Patches of 16x16 without noise, each about its mean grey."""

    def prepared(data: Batch) -> Batch:
        return (data[1] - data[1].mean((2, 3), keepdim=True),)

    parts = photo_patches(16, 0.0)
    return Splits(prepared(parts.train), prepared(parts.validation), prepared(parts.test))


@suite_task("dense prediction", "dB", "higher", steps=300, batch_size=16)
def super_resolution() -> Setup:
    """16x16 from 8x8 by a pixel shuffle, with the absolute error; chance is the mean of each patch."""

    def prepared(data: Batch) -> Batch:
        return F.avg_pool2d(data[0], 2), data[0]

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x, y = batch
        return F.l1_loss(model(x), y)

    parts = clean_patches()
    splits = Splits(prepared(parts.train), prepared(parts.validation), prepared(parts.test))
    model = nn.Sequential(
        nn.Conv2d(1, 24, 5, padding=2),
        nn.PReLU(),
        nn.Conv2d(24, 24, 3, padding=1),
        nn.PReLU(),
        nn.Conv2d(24, 4, 3, padding=1),
        nn.PixelShuffle(2),
    )
    chance = decibels(splits.test[1].square().mean().item())
    return Setup(model, splits, loss, lambda net, data: decibels(squared_error(net, data)), chance)


class Sine(nn.Module):
    """A linear layer and a sine, initialised as SIREN's."""

    def __init__(self, inputs: int, outputs: int, frequency: float, first: bool = False) -> None:
        super().__init__()
        self.linear, self.frequency = nn.Linear(inputs, outputs), frequency
        bound = 1 / inputs if first else math.sqrt(6 / inputs) / frequency
        nn.init.uniform_(self.linear.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.frequency * self.linear(x))


@suite_task("regression", "dB", "higher", steps=500, batch_size=256)
def siren_photo() -> Setup:
    """The colours of a photograph of 53x80 by coordinates; the metric is on pixels left out of the training."""
    photo = torch.tensor(load_sample_image("flower.jpg"), dtype=torch.float32) / 255
    photo = F.avg_pool2d(photo.permute(2, 0, 1)[None], 8)[0]
    _, height, width = photo.shape
    axes = torch.linspace(-1, 1, height), torch.linspace(-1, 1, width)
    places = torch.stack(torch.meshgrid(*axes, indexing="ij"), 2).flatten(0, 1)
    splits = split((places, photo.flatten(1).T.contiguous()), 400, 800)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x, y = batch
        return F.mse_loss(model(x), y)

    model = nn.Sequential(Sine(2, 64, 15.0, first=True), Sine(64, 64, 15.0), Sine(64, 64, 15.0), nn.Linear(64, 3))
    chance = decibels(F.mse_loss(splits.train[1].mean(0).expand_as(splits.test[1]), splits.test[1]).item())
    return Setup(model, splits, loss, lambda net, data: decibels(squared_error(net, data)), chance)


TASKS = (super_resolution, siren_photo)
