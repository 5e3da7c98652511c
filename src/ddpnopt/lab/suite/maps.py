"""Maps of a picture: how high the ground is, and where the centres are."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt.lab.suite.data import generator, split
from ddpnopt.lab.suite.task import Batch, Setup, Splits, suite_task


def lit_hills(number: int = 1800, size: int = 16) -> Splits:
    """Hills lit from one side, and the height of the ground."""
    source = generator(133)
    axis = torch.arange(size, dtype=torch.float32)
    centre = size * torch.rand(number, 4, 2, generator=source)
    width = 2 + 2 * torch.rand(number, 4, 1, generator=source)
    height = 0.5 + torch.rand(number, 4, generator=source)
    rows = torch.exp(-((axis - centre[..., :1]) ** 2) / (2 * width**2))
    columns = torch.exp(-((axis - centre[..., 1:]) ** 2) / (2 * width**2))
    ground = torch.einsum("nk,nkr,nkc->nrc", height, rows, columns)
    across, down = F.pad(ground, (1, 1)).unfold(2, 3, 1), F.pad(ground, (0, 0, 1, 1)).unfold(1, 3, 1)
    slope, other = (across[..., 2] - across[..., 0]) / 2, (down[..., 2] - down[..., 0]) / 2
    light = (1 + 2 * slope + other) / torch.sqrt(1 + 4 * slope**2 + other**2)
    x = light + 0.05 * torch.randn(light.shape, generator=source)
    return split((x[:, None, 1:-1, 1:-1], ground[:, None, 1:-1, 1:-1]), 200, 300)


class DepthNet(nn.Module):
    """Two resolutions; the coarse features are enlarged and added to the fine ones."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.fine = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.GroupNorm(3, width), nn.SiLU())
        self.coarse = nn.Sequential(
            nn.Conv2d(width, 2 * width, 3, 2, padding=1),
            nn.GroupNorm(3, 2 * width),
            nn.SiLU(),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1, dilation=1),
            nn.SiLU(),
            nn.Conv2d(2 * width, width, 3, padding=2, dilation=2),
            nn.SiLU(),
        )
        self.out = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.SiLU(), nn.Conv2d(width, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        fine = self.fine(x)
        return self.out(fine + F.interpolate(self.coarse(fine), scale_factor=2.0, mode="bilinear"))


@suite_task("dense prediction", "absolute error", "lower", steps=300, batch_size=20)
def depth_from_shading() -> Setup:
    """The height of hills from their light, with the absolute error; chance is the median of the training data."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.l1_loss(model(batch[0]), batch[1])

    splits = lit_hills()
    chance = (splits.test[1] - splits.train[1].median(0).values).abs().mean().item()
    return Setup(DepthNet(), splits, loss, lambda net, data: loss(net, data).item(), chance)


def crosses_and_dots(number: int = 2200, size: int = 16) -> Splits:
    """One to three small crosses among dots, in noise, and a map that is 1 at their centres and falls off around."""
    source = generator(134)
    cells = torch.rand(number, 16, generator=source).argsort(1)[:, :7]
    inner = torch.randint(3, (number, 7, 2), generator=source)
    place = torch.stack([cells // 4, cells % 4], 2) * 4 + inner
    many = 1 + torch.randint(3, (number, 1), generator=source)
    wanted = (torch.arange(7) < many).float()
    axis = torch.arange(size)
    down, right = (axis - place[..., :1]).abs(), (axis - place[..., 1:]).abs()
    near = down[..., :, None] + right[..., None, :]
    cross = (near <= 1).float()
    dot = ((down[..., :, None] <= 1) & (right[..., None, :] <= 1) & (near != 1)).float()
    shown = wanted[..., None, None] * cross + (1 - wanted)[..., None, None] * dot
    bright = 0.7 + 0.6 * torch.rand(number, 7, 1, 1, generator=source)
    x = (bright * shown).sum(1) + 0.5 * torch.randn(number, size, size, generator=source)
    squared = (down**2)[..., :, None] + (right**2)[..., None, :]
    heat = (wanted[..., None, None] * torch.exp(-squared / 1.5)).amax(1)
    return split((x[:, None], heat), 300, 500)


def focal(logits: Tensor, heat: Tensor) -> Tensor:
    """CenterNet's loss: places that are certain count little, those near a centre less; per centre."""
    sure, unsure = logits.sigmoid(), (-logits).sigmoid()
    centre = heat == 1
    hit = unsure**2 * F.logsigmoid(logits)
    miss = (1 - heat) ** 4 * sure**2 * F.logsigmoid(-logits)
    return -torch.where(centre, hit, miss).sum() / centre.sum().clamp_min(1)


def centres_found(model: nn.Module, data: Batch) -> float:
    """Of the centres, the share that is among as many of the highest peaks of the map as the picture has centres."""
    logits = model(data[0])
    peaks = logits.masked_fill(logits < F.max_pool2d(logits[:, None], 3, 1, padding=1)[:, 0], -math.inf)
    centre = data[1] == 1
    order = peaks.flatten(1).argsort(1, descending=True).argsort(1)
    found = (order < centre.flatten(1).sum(1, keepdim=True)) & centre.flatten(1)
    return 100 * found.sum().item() / centre.sum().item()


@suite_task("dense prediction", "recall %", "higher", steps=300, batch_size=25)
def focal_centres() -> Setup:
    """Where the crosses are and not the dots: a heat map with the focal loss; most of it is ground."""
    out = nn.Conv2d(24, 1, 1)
    if out.bias is not None:
        nn.init.constant_(out.bias, -2.2)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 24, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(24, 24, 1),
        nn.ReLU(),
        out,
        nn.Flatten(1, 2),
    )
    splits = crosses_and_dots()
    chance = 100 * (splits.test[1] == 1).double().mean().item()
    return Setup(model, splits, lambda net, batch: focal(net(batch[0]), batch[1]), centres_found, chance)


TASKS = (depth_from_shading, focal_centres)
