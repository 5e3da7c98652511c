"""Exact likelihoods: a flow of coupling layers, and pixels one after the other."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sklearn.datasets import make_moons
from torch import Tensor, nn

from ddpnopt.lab.suite.data import digits, split, standardised
from ddpnopt.lab.suite.fully_connected import dense
from ddpnopt.lab.suite.generative import mean_picture
from ddpnopt.lab.suite.task import Batch, Setup, Splits, suite_task


class CouplingFlow(nn.Module):
    """RealNVP in the plane: one coordinate is moved and scaled as the other says, in turn; returns log-densities."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.networks = nn.ModuleList(dense([1, 32, 32, 2]) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        fixed, moved = x[:, :1], x[:, 1:]
        volume = torch.zeros(len(x))
        for network in self.networks:
            shift, scale = network(fixed).chunk(2, 1)
            scale = 2 * torch.tanh(scale)
            fixed, moved = moved * scale.exp() + shift, fixed
            volume = volume + scale[:, 0]
        z = torch.cat([fixed, moved], 1)
        normal = torch.distributions.Normal(0.0, 1.0)
        return normal.log_prob(z).sum(1) + volume


@suite_task("generative", "nats", "lower", steps=500, batch_size=128)
def coupling_flow() -> Setup:
    """Two moons; chance is the Gaussian of the training data."""
    x, _ = make_moons(4000, noise=0.07, random_state=90)
    parts = split((torch.tensor(x, dtype=torch.float32),), 600, 1000)
    train, validation, test = standardised(parts.train[0], parts.validation[0], parts.test[0])

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return -model(batch[0]).mean()

    gaussian = torch.distributions.MultivariateNormal(train.mean(0), train.T.cov())
    chance = -gaussian.log_prob(test).mean().item()
    splits = Splits((train,), (validation,), (test,))
    return Setup(CouplingFlow(), splits, loss, lambda net, data: loss(net, data).item(), chance)


class MaskedConv(nn.Conv2d):
    """A convolution that sees the pixels before its own, and its own unless `strict`."""

    def __init__(self, inputs: int, outputs: int, size: int, strict: bool) -> None:
        super().__init__(inputs, outputs, size, padding=size // 2)
        mask = torch.ones(size, size)
        mask[size // 2, size // 2 + (not strict) :] = 0
        mask[size // 2 + 1 :] = 0
        self.mask: Tensor
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight * self.mask, self.bias, padding=self.padding)


@suite_task("generative", "nats per picture", "lower", steps=400, batch_size=50)
def pixel_by_pixel() -> Setup:
    """Black and white digits, each pixel from those above and to the left (PixelCNN)."""

    def prepared(data: Batch) -> Batch:
        return ((data[0][:, None] > 0.5).float(),)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        (x,) = batch
        return F.binary_cross_entropy_with_logits(model(x), x, reduction="sum") / len(x)

    parts = digits()
    splits = Splits(prepared(parts.train), prepared(parts.validation), prepared(parts.test))
    model = nn.Sequential(
        MaskedConv(1, 24, 5, strict=True),
        nn.ReLU(),
        MaskedConv(24, 24, 3, strict=False),
        nn.ReLU(),
        MaskedConv(24, 24, 3, strict=False),
        nn.ReLU(),
        MaskedConv(24, 1, 1, strict=False),
    )
    return Setup(model, splits, loss, lambda net, data: loss(net, data).item(), mean_picture(splits))


TASKS = (coupling_flow, pixel_by_pixel)
