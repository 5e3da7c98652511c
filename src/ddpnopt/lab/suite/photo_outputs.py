"""Photographs as targets: hidden patches, a finer resolution, colours by coordinates."""

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


def clean_patches(scale: float = 1.0) -> Splits:
    """Patches of 16x16 without noise, each about its mean grey and divided by `scale`."""

    def prepared(data: Batch) -> Batch:
        return ((data[1] - data[1].mean((2, 3), keepdim=True)) / scale,)

    parts = photo_patches(16, 0.0)
    return Splits(prepared(parts.train), prepared(parts.validation), prepared(parts.test))


class MaskedAutoencoder(nn.Module):
    """Encodes the visible of 16 patches and decodes all, the others from one learned token."""

    def __init__(self, pixels: int = 16, places: int = 16, width: int = 48) -> None:
        super().__init__()
        self.embed = nn.Linear(pixels, width)
        self.places = nn.Parameter(0.02 * torch.randn(places, width))
        self.hidden = nn.Parameter(0.02 * torch.randn(width))
        self.encoder, self.decoder = self._layer(width), self._layer(width)
        self.head = nn.Linear(width, pixels)

    @staticmethod
    def _layer(width: int) -> nn.TransformerEncoderLayer:
        return nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )

    def forward(self, patches: Tensor, order: Tensor, visible: int) -> Tensor:
        """All patches in the given order, of which the first `visible` ones are seen."""
        places = self.places[order]
        seen = patches.gather(1, order[:, :visible, None].expand(-1, -1, patches.shape[2]))
        code = self.encoder(self.embed(seen) + places[:, :visible])
        hidden = self.hidden.expand(len(code), places.shape[1] - visible, -1)
        return self.head(self.decoder(torch.cat([code, hidden], 1) + places))


def hidden_patch_error(model: nn.Module, batch: Batch) -> Tensor:
    """Squared error on ten patches of 4x4 at random, given the other six."""
    (x,) = batch
    patches = F.unfold(x, 4, stride=4).transpose(1, 2)
    order = torch.rand(len(x), 16).argsort(1)
    wanted = patches.gather(1, order[:, :, None].expand_as(patches))
    return F.mse_loss(model(patches, order, 6)[:, 6:], wanted[:, 6:])


@suite_task("patches", "squared error", "lower", steps=500, batch_size=40, sealed=True)
def masked_autoencoder() -> Setup:
    """Ten of the sixteen patches of a photograph's part are hidden; chance is its mean grey."""
    splits = clean_patches(0.1)
    chance = splits.test[0].square().mean().item()
    model = MaskedAutoencoder()
    return Setup(model, splits, hidden_patch_error, lambda net, data: hidden_patch_error(net, data).item(), chance)


@suite_task("dense prediction", "dB", "higher", steps=300, batch_size=16, sealed=True)
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


@suite_task("regression", "dB", "higher", steps=500, batch_size=256, sealed=True)
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


TASKS = (masked_autoencoder, super_resolution, siren_photo)
