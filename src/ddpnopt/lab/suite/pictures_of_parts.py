"""Pictures of parts that belong together: clocks to be read and drawn, tiles to be counted, spoilt pixels."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt.lab.suite.data import generator, split
from ddpnopt.lab.suite.fully_connected import classifier
from ddpnopt.lab.suite.generative import decibels, photo_patches
from ddpnopt.lab.suite.measures import squared_error
from ddpnopt.lab.suite.task import Batch, Setup, Splits, suite_task

HOURS = 12


@lru_cache
def clocks(size: int, number: int, seed: int) -> tuple[Tensor, Tensor]:
    """Ink of clocks (number, 1, size, size) in [0, 1] with a short and a long hand, and the hours they show."""
    source = generator(seed)
    hour = torch.randint(HOURS, (number,), generator=source)
    minute = torch.rand(number, generator=source)
    axis = torch.linspace(-1, 1, size)
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), 2).view(1, -1, 2)
    centre = 0.15 * (2 * torch.rand(number, 1, 2, generator=source) - 1)
    ink = torch.zeros(number, size * size)
    for turn, length, width in (((hour + minute) / HOURS, 0.45, 0.16), (minute, 0.8, 0.09)):
        angle = 2 * torch.pi * turn
        tip = length * torch.stack([-angle.cos(), angle.sin()], 1)[:, None]
        share = ((grid - centre) * tip).sum(2, keepdim=True) / length**2
        distance = (grid - centre - share.clamp(0, 1) * tip).norm(dim=2)
        ink = torch.maximum(ink, torch.exp(-((distance / width) ** 2)))
    return ink.view(number, 1, size, size), hour


class Bottleneck(nn.Module):
    """A narrow convolution between two of single pixels, with batch norm; a projection where the size changes."""

    def __init__(self, inputs: int, narrow: int, stride: int = 1) -> None:
        super().__init__()
        outputs = 4 * narrow
        self.body = nn.Sequential(
            nn.Conv2d(inputs, narrow, 1, bias=False),
            nn.BatchNorm2d(narrow),
            nn.ReLU(),
            nn.Conv2d(narrow, narrow, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(narrow),
            nn.ReLU(),
            nn.Conv2d(narrow, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        same = inputs == outputs and stride == 1
        projection = (nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.short = nn.Identity() if same else nn.Sequential(*projection)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.short(x))


@suite_task("residual", "accuracy %", "higher", steps=300, batch_size=32, sealed=True)
def bottleneck_clocks() -> Setup:
    """Which hour a noisy clock shows: ResNet-50's stem, which is strided and pooled, and bottleneck blocks."""
    ink, hour = clocks(24, 8000, 210)
    x = ink + 0.15 * torch.randn(ink.shape, generator=generator(211))
    model = nn.Sequential(
        nn.Conv2d(1, 16, 5, 2, padding=2, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, padding=1),
        Bottleneck(16, 8),
        Bottleneck(32, 8),
        Bottleneck(32, 16, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, HOURS),
    )
    return classifier(model, split((x, hour), 500, 1000))


class ConditionalVAE(nn.Module):
    """Encoder and decoder both know the hour; returns the decoder's logits and the code's mean and log-variance."""

    def __init__(self, latent: int = 6) -> None:
        super().__init__()
        self.hours = nn.Embedding(HOURS, 16)
        self.see = nn.Sequential(nn.Conv2d(1, 12, 4, 2, 1), nn.SiLU(), nn.Conv2d(12, 24, 4, 2, 1), nn.SiLU())
        self.code = nn.Linear(24 * 16 + 16, 2 * latent)
        self.unfold = nn.Sequential(nn.Linear(latent + 16, 24 * 16), nn.SiLU(), nn.Unflatten(1, (24, 4, 4)))
        self.draw = nn.Sequential(nn.ConvTranspose2d(24, 12, 4, 2, 1), nn.SiLU(), nn.ConvTranspose2d(12, 1, 4, 2, 1))

    def forward(self, x: Tensor, hour: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        known = self.hours(hour)
        mean, spread = self.code(torch.cat([self.see(x).flatten(1), known], 1)).chunk(2, 1)
        z = mean + torch.exp(spread / 2) * torch.randn_like(mean)
        return self.draw(self.unfold(torch.cat([z, known], 1))), mean, spread


@suite_task("generative", "nats per picture", "lower", steps=500, batch_size=40, sealed=True)
def conditional_clocks() -> Setup:
    """A variational autoencoder of clocks that is told the hour; chance is the mean clock of each hour."""
    ink, hour = clocks(16, 4000, 212)
    splits = split(((ink > 0.5).float(), hour), 500, 1000)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        logits, mean, spread = model(*batch)
        picture = F.binary_cross_entropy_with_logits(logits, batch[0], reduction="sum")
        return (picture + (mean**2 + spread.exp() - 1 - spread).sum() / 2) / len(mean)

    x, y = splits.train
    means = torch.stack([x[y == each].mean(0) for each in range(HOURS)]).clamp(1e-3, 1 - 1e-3)
    test = splits.test
    chance = F.binary_cross_entropy(means[test[1]], test[0], reduction="sum").item() / len(test[0])
    return Setup(ConditionalVAE(), splits, loss, lambda net, data: loss(net, data).item(), chance)


class ScaledBlock(nn.Module):
    """Attention of `x` or of a class token alone to all tokens, and a network, both scaled by learned small factors."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.network = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.scale1, self.scale2 = (nn.Parameter(torch.full((width,), 0.1)) for _ in range(2))

    def forward(self, x: Tensor, token: Tensor | None = None) -> Tensor:
        every = self.norm1(x if token is None else torch.cat([token, x], 1))
        asking, x = (every, x) if token is None else (every[:, :1], token)
        x = x + self.scale1 * self.attention(asking, every, every, need_weights=False)[0]
        return x + self.scale2 * self.network(self.norm2(x))


class ClassAttention(nn.Module):
    """Patches of 6x6 after a convolution, two blocks among themselves, one in which a class token asks them (CaiT)."""

    def __init__(self, patches: int, classes: int, width: int = 32) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, width, 6, 6))
        self.places = nn.Parameter(0.1 * torch.randn(patches, width))
        self.token = nn.Parameter(0.1 * torch.randn(1, 1, width))
        self.blocks = nn.ModuleList(ScaledBlock(width) for _ in range(3))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2) + self.places
        *among, last = self.blocks
        for block in among:
            x = block(x)
        return self.head(last(x, self.token.expand(len(x), -1, -1))[:, 0])


@suite_task("patches", "accuracy %", "higher", steps=300, batch_size=32, sealed=True)
def class_attention_tiles() -> Setup:
    """Nine tiles of waves in noise: which direction do most of them have? Layer scale and class attention (CaiT)."""
    source = generator(213)
    number = 6000
    most = torch.randint(4, (number, 1), generator=source)
    # Four or five tiles of the most frequent direction, at most two of any other.
    others = torch.tensor([1, 2, 3, 1, 2]).expand(number, -1)
    fifth = torch.rand(number, 1, generator=source) < 0.5
    others = torch.where((torch.arange(5) == 4) & fifth, 0, others)
    kind = (most + torch.cat([torch.zeros(number, 4, dtype=torch.long), others], 1)) % 4
    kind = kind.gather(1, torch.rand(number, 9, generator=source).argsort(1))
    angle = (torch.pi / 4 * kind)[:, :, None, None]
    axis = torch.arange(6)
    along = axis[:, None] * angle.sin() + axis * angle.cos()
    tiles = torch.sin(1.6 * along + 6.3 * torch.rand(number, 9, 1, 1, generator=source))
    x = tiles.view(number, 3, 3, 6, 6).transpose(2, 3).reshape(number, 1, 18, 18)
    x = x + 1.0 * torch.randn(x.shape, generator=source)
    return classifier(ClassAttention(9, 4), split((x, most[:, 0]), 600, 1200))


class SkippingUNet(nn.Module):
    """Two levels down by strided convolutions and up by nearest pixels, each level joined to the one it came from."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.LeakyReLU(0.1))
        self.down1 = nn.Sequential(nn.Conv2d(width, width, 3, 2, padding=1), nn.LeakyReLU(0.1))
        self.down2 = nn.Sequential(nn.Conv2d(width, 2 * width, 3, 2, padding=1), nn.LeakyReLU(0.1))
        self.up1 = nn.Sequential(nn.Conv2d(3 * width, width, 3, padding=1), nn.LeakyReLU(0.1))
        self.up2 = nn.Sequential(nn.Conv2d(2 * width, width, 3, padding=1), nn.LeakyReLU(0.1))
        self.last = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.first(x)
        middle = self.down1(fine)
        coarse = F.interpolate(self.down2(middle), scale_factor=2.0)
        middle = F.interpolate(self.up1(torch.cat([coarse, middle], 1)), scale_factor=2.0)
        return self.last(self.up2(torch.cat([middle, fine], 1)))


@suite_task("dense prediction", "dB", "higher", steps=300, batch_size=12, sealed=True)
def salt_and_pepper() -> Setup:
    """Photographs with three of ten pixels black or white, by the absolute error; chance is the mean grey."""
    source = generator(214)

    def spoilt(data: Batch) -> Batch:
        y = data[1] - 0.5
        draw = torch.rand(y.shape, generator=source)
        return torch.where(draw < 0.15, -0.5, torch.where(draw > 0.85, 0.5, y)), y

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.l1_loss(model(batch[0]), batch[1])

    parts = photo_patches(16, 0.0)
    splits = Splits(spoilt(parts.train), spoilt(parts.validation), spoilt(parts.test))
    chance = decibels((splits.test[1] - splits.train[1].mean()).square().mean().item())
    return Setup(SkippingUNet(), splits, loss, lambda net, data: decibels(squared_error(net, data)), chance)


TASKS = (bottleneck_clocks, conditional_clocks, class_attention_tiles, salt_and_pepper)
