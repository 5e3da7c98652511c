"""Generative models of pictures: a convolutional beta-VAE with squared errors, fully connected layers with masks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt.lab.suite.data import draw_shape, generator, split
from ddpnopt.lab.suite.generative import mean_picture, upsampled_digits
from ddpnopt.lab.suite.task import Batch, Setup, suite_task

BETA = 2.0
# The deviation that a pixel is assumed to have.
PIXEL = 0.3


class ConvolutionalVAE(nn.Module):
    """Strided convolutions to a Gaussian code of six, transposed ones back to 12x12 pixels."""

    def __init__(self, code: int = 6, width: int = 12) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, width, 4, 2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, 2 * width, 4, 2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(2 * width * 9, 2 * code),
        )
        self.decoder = nn.Sequential(
            nn.Linear(code, 2 * width * 9),
            nn.LeakyReLU(0.2),
            nn.Unflatten(1, (2 * width, 3, 3)),
            nn.ConvTranspose2d(2 * width, width, 4, 2, padding=1),
            nn.LeakyReLU(0.2),
            nn.ConvTranspose2d(width, 1, 4, 2, padding=1),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        return self.decoder(mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)), mean, log_variance


@suite_task("generative", "nats per picture", "lower", steps=500, batch_size=32)
def beta_vae_shapes() -> Setup:
    """Discs, squares, crosses and rings; the divergence counts twice. Chance is the mean picture."""
    source = generator(132)
    kind = torch.randint(4, (3500,), generator=source)
    splits = split((draw_shape(kind, 12, source)[:, None],), 400, 600)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        (x,) = batch
        found, mean, log_variance = model(x)
        pixels = F.mse_loss(found, x, reduction="sum") / (2 * PIXEL**2)
        divergence = -0.5 * torch.sum(1 + log_variance - mean**2 - log_variance.exp())
        return (pixels + BETA * divergence) / len(x)

    (x,) = splits.test
    chance = (x - splits.train[0].mean(0)).square().sum().item() / (2 * PIXEL**2 * len(x))
    return Setup(ConvolutionalVAE(), splits, loss, lambda net, data: loss(net, data).item(), chance)


class MaskedLinear(nn.Linear):
    """A linear layer some of whose weights are held at zero."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__(mask.shape[1], mask.shape[0])
        self.mask: Tensor
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.mask, self.bias)


def masked_network(pixels: int, width: int) -> nn.Sequential:
    """MADE: each output depends on the pixels before it alone."""
    order = torch.arange(pixels)
    hidden = torch.arange(width) % (pixels - 1)
    return nn.Sequential(
        MaskedLinear((hidden[:, None] >= order).float()),
        nn.ReLU(),
        MaskedLinear((hidden[:, None] >= hidden).float()),
        nn.ReLU(),
        MaskedLinear((order[:, None] > hidden).float()),
    )


@suite_task("generative", "nats per picture", "lower", steps=500, batch_size=50)
def masked_layers() -> Setup:
    """Black and white digits of 9x9, each pixel from all before it by masked fully connected layers (MADE)."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        (x,) = batch
        return F.binary_cross_entropy_with_logits(model(x), x, reduction="sum") / len(x)

    splits = upsampled_digits(9)
    model = masked_network(81, 240)
    return Setup(model, splits, loss, lambda net, data: loss(net, data).item(), mean_picture(splits))


TASKS = (beta_vae_shapes, masked_layers)
