"""Autoencoders, diffusion, and networks whose output is a picture."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from sklearn.datasets import load_sample_images
from torch import Tensor, nn

from ddpnopt.lab.suite.data import cluttered_masks, digits, generator
from ddpnopt.lab.suite.fully_connected import dense
from ddpnopt.lab.suite.task import Batch, Setup, Splits, suite_task


@lru_cache
def upsampled_digits(size: int = 12) -> Splits:
    """Digits of size x size as flat rows of black and white pixels."""

    def enlarge(data: Batch) -> Batch:
        x = F.interpolate(data[0][:, None], size=(size, size), mode="bilinear", align_corners=False)
        return ((x.flatten(1) > 0.5).float(),)

    parts = digits()
    return Splits(enlarge(parts.train), enlarge(parts.validation), enlarge(parts.test))


def mean_picture(splits: Splits) -> float:
    """Cross-entropy per picture of always answering the mean training picture."""
    (x,) = splits.test
    mean = splits.train[0].mean(0).clamp(1e-3, 1 - 1e-3).expand_as(x)
    return F.binary_cross_entropy(mean, x, reduction="sum").item() / len(x)


def reconstruction(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of the pixels, summed per picture."""
    (x,) = batch
    return F.binary_cross_entropy_with_logits(model(x), x, reduction="sum") / len(x)


@suite_task("generative", "nats per picture", "lower", steps=800, batch_size=50)
def deep_autoencoder() -> Setup:
    """Eight layers of tanh around a bottleneck of 10."""
    splits = upsampled_digits()
    model = dense([144, 128, 64, 32, 10, 32, 64, 128, 144], nn.Tanh)
    return Setup(
        model, splits, reconstruction, lambda net, data: reconstruction(net, data).item(), mean_picture(splits)
    )


class SmallVAE(nn.Module):
    """Gaussian code of 8; returns logits of the pixels, mean and log-variance of the code."""

    def __init__(self, pixels: int, code: int = 8) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(pixels, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())
        self.mean, self.log_variance = nn.Linear(64, code), nn.Linear(64, code)
        self.decoder = dense([code, 64, 128, pixels])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.encoder(x)
        mean, log_variance = self.mean(h), self.log_variance(h)
        z = mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)
        return self.decoder(z), mean, log_variance


def negative_elbo(model: nn.Module, batch: Batch) -> Tensor:
    """Reconstruction plus KL divergence from the standard normal, per picture."""
    (x,) = batch
    logits, mean, log_variance = model(x)
    pixels = F.binary_cross_entropy_with_logits(logits, x, reduction="sum")
    divergence = -0.5 * torch.sum(1 + log_variance - mean**2 - log_variance.exp())
    return (pixels + divergence) / len(x)


@suite_task("generative", "nats per picture", "lower", steps=800, batch_size=50)
def vae() -> Setup:
    """A variational autoencoder of digits, measured by the negative evidence bound."""
    splits = upsampled_digits()
    return Setup(
        SmallVAE(144), splits, negative_elbo, lambda net, data: negative_elbo(net, data).item(), mean_picture(splits)
    )


class NoisePredictor(nn.Module):
    """The noise in a picture, given the picture and the noise level."""

    def __init__(self, pixels: int, width: int = 192) -> None:
        super().__init__()
        self.level, self.picture = nn.Linear(2, width), nn.Linear(pixels, width)
        self.body = nn.Sequential(nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.out = nn.Linear(width, pixels)

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        return self.out(self.body(self.picture(x) + self.level(level)))


def denoising_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean squared error of the predicted noise at a random level."""
    (x,) = batch
    angle = torch.rand(len(x), 1) * math.pi / 2
    noise = torch.randn_like(x)
    signal, level = torch.cos(angle), torch.sin(angle)
    return F.mse_loss(model(signal * x + level * noise, torch.cat([signal, level], 1)), noise)


@suite_task("generative", "squared error", "lower", steps=600, batch_size=64)
def diffusion_digits() -> Setup:
    """Diffusion of digits; each held-out digit is measured with eight draws of the noise."""

    def prepared(data: Batch, copies: int) -> Batch:
        return (2 * data[0].flatten(1).repeat(copies, 1) - 1,)

    parts = digits()
    splits = Splits(prepared(parts.train, 1), prepared(parts.validation, 8), prepared(parts.test, 8))
    model = NoisePredictor(64)
    return Setup(model, splits, denoising_loss, lambda net, data: denoising_loss(net, data).item(), chance=1.0)


class SmallUNet(nn.Module):
    """Two resolutions down, two up, features of the way down joined on the way up."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down1, self.down2 = self._pair(1, width), self._pair(width, 2 * width)
        self.bottom = self._pair(2 * width, 4 * width)
        self.lift2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.up2 = self._pair(4 * width, 2 * width)
        self.lift1 = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.up1 = self._pair(2 * width, width)
        self.out = nn.Conv2d(width, 1, 1)

    @staticmethod
    def _pair(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.Conv2d(outputs, outputs, 3, padding=1), nn.ReLU()
        )

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        h = self.bottom(F.max_pool2d(second, 2))
        h = self.up2(torch.cat([self.lift2(h), second], 1))
        return self.out(self.up1(torch.cat([self.lift1(h), first], 1)))


def overlap(model: nn.Module, data: Batch) -> float:
    """Intersection over union of the mask in percent, over all pixels of the split."""
    x, y = data
    found, wanted = model(x) > 0, y > 0.5
    return 100 * (found & wanted).sum().item() / max((found | wanted).sum().item(), 1)


@suite_task("dense prediction", "overlap %", "higher", steps=350, batch_size=25)
def unet_shapes() -> Setup:
    """Find the disc or ring and leave the square or cross: pixelwise cross-entropy plus the Dice loss."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x, y = batch
        logits = model(x)
        p = logits.sigmoid()
        dice = 1 - (2 * (p * y).sum((1, 2, 3)) + 1) / (p.sum((1, 2, 3)) + y.sum((1, 2, 3)) + 1)
        return F.binary_cross_entropy_with_logits(logits, y) + dice.mean()

    splits = cluttered_masks()
    return Setup(SmallUNet(), splits, loss, overlap, 100 * splits.test[1].mean().item())


@lru_cache
def photo_patches(size: int = 14, noise: float = 0.15) -> Splits:
    """Grey patches of scikit-learn's two photographs, noisy and clean; held-out patches come from other rows."""
    source = generator(31)

    def patches(top: int, bottom: int, number: int) -> Batch:
        clean = []
        for photo in photos:
            rows = torch.randint(top, bottom - size, (number // 2,), generator=source).tolist()
            columns = torch.randint(photo.shape[1] - size, (number // 2,), generator=source).tolist()
            clean += [photo[r : r + size, c : c + size] for r, c in zip(rows, columns, strict=True)]
        y = torch.stack(clean)[:, None]
        return y + noise * torch.randn(y.shape, generator=source), y

    photos = [torch.tensor(picture, dtype=torch.float32).mean(2) / 255 for picture in load_sample_images().images]
    # Rows of the pictures: 427 in all.
    return Splits(patches(0, 280, 2000), patches(280, 350, 200), patches(350, 427, 300))


def decibels(error: float) -> float:
    """Peak signal-to-noise ratio of pictures in [0, 1]."""
    return -10 * math.log10(max(error, 1e-12)) if error < math.inf else math.nan


@suite_task("dense prediction", "dB", "higher", steps=250, batch_size=25)
def photo_denoising() -> Setup:
    """Five convolutions predict the noise of a patch, which is subtracted (DnCNN)."""

    class Denoiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers: list[nn.Module] = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()]
            for _ in range(3):
                layers += [nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()]
            self.noise = nn.Sequential(*layers, nn.Conv2d(16, 1, 3, padding=1))

        def forward(self, x: Tensor) -> Tensor:
            return x - self.noise(x)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x, y = batch
        return F.mse_loss(model(x), y)

    splits = photo_patches()
    x, y = splits.test
    chance = decibels(F.mse_loss(x, y).item())
    return Setup(Denoiser(), splits, loss, lambda net, data: decibels(loss(net, data).item()), chance)


TASKS = (deep_autoencoder, vae, diffusion_digits, unet_shapes, photo_denoising)
