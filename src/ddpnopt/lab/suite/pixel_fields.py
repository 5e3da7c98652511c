"""A value for each pixel: how it has moved, which ground it shows, how many things are near it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt.lab.suite.data import generator, split
from ddpnopt.lab.suite.task import Batch, Setup, Splits, suite_task


def places(size: int) -> Tensor:
    """Rows and columns of a picture as (size, size, 2), right before down, in [-1, 1]."""
    axis = torch.linspace(-1, 1, size)
    return torch.stack(torch.meshgrid(axis, axis, indexing="ij"), 2).flip(2)


def two_frames(number: int = 2000, size: int = 16) -> Splits:
    """A soft random texture before and after it was shifted, turned and stretched, and how many pixels each moved."""
    source = generator(171)
    texture = F.interpolate(torch.randn(number, 1, 14, 14, generator=source), size=40, mode="bicubic")
    grid = places(size).expand(number, -1, -1, -1)
    shift = 0.22 * torch.randn(number, 1, 1, 2, generator=source).clamp(-2, 2)
    turn = 0.1 * torch.randn(number, 2, 2, generator=source)
    motion = shift + torch.einsum("nij,nyxj->nyxi", turn, grid)
    before = F.grid_sample(texture, 0.6 * grid, align_corners=True)
    after = F.grid_sample(texture, 0.6 * (grid + motion), align_corners=True)
    x = torch.cat([before, after], 1)
    flow = motion.permute(0, 3, 1, 2) * (size - 1) / 2
    return split((x + 0.05 * torch.randn(x.shape, generator=source), flow), 250, 400)


def end_point_error(found: Tensor, flow: Tensor) -> Tensor:
    """Mean distance in pixels, a little rounded at zero."""
    return ((found - flow).square().sum(1) + 1e-4).sqrt().mean()


@suite_task("dense prediction", "end-point error", "lower", steps=400, batch_size=20, sealed=True)
def optical_flow() -> Setup:
    """Where each pixel has gone from one picture to the next: convolutions down and up again."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return end_point_error(model(batch[0]), batch[1])

    splits = two_frames()
    model = nn.Sequential(
        nn.Conv2d(2, 24, 5, padding=2),
        nn.LeakyReLU(0.1),
        nn.Conv2d(24, 32, 3, 2, padding=1),
        nn.LeakyReLU(0.1),
        nn.Conv2d(32, 32, 3, 2, padding=1),
        nn.LeakyReLU(0.1),
        nn.ConvTranspose2d(32, 24, 4, 2, padding=1),
        nn.LeakyReLU(0.1),
        nn.ConvTranspose2d(24, 2, 4, 2, padding=1),
    )
    chance = end_point_error(splits.train[1].mean(0).expand_as(splits.test[1]), splits.test[1]).item()
    return Setup(model, splits, loss, lambda net, data: loss(net, data).item(), chance)


GROUNDS, UNKNOWN = 4, 255


def land(number: int = 1200, size: int = 20) -> Splits:
    """Six fields of four kinds of ground, which differ in their waves; pixels at a border have no label."""
    source = generator(172)
    kind = torch.randint(GROUNDS, (number, 6), generator=source)
    towns = 2 * torch.rand(number, 1, 6, 2, generator=source) - 1
    grid = places(size).flatten(0, 1)[None, :, None]
    distance, nearest = (grid - towns).norm(dim=3).sort(2)
    label = kind.gather(1, nearest[:, :, 0])
    blurred = distance[:, :, 1] - distance[:, :, 0] < 0.06
    axis = torch.arange(size)
    waves = []
    for down, right in ((1.6, 0.0), (0.0, 1.6), (0.8, 0.8), (1.4, -1.4)):
        phase = 6.3 * torch.rand(number, 1, 1, generator=source)
        waves.append(torch.sin(down * axis[None, :, None] + right * axis + phase).flatten(1))
    x = torch.stack(waves, 2).gather(2, label[:, :, None])[:, :, 0]
    x = x + 0.8 * torch.randn(x.shape, generator=source)
    label = torch.where(blurred, UNKNOWN, label)
    return split((x.view(number, 1, size, size), label.view(number, size, size)), 150, 300)


class Pyramid(nn.Module):
    """Convolutions of several dilations side by side and the mean of the picture, joined (DeepLab)."""

    def __init__(self, inputs: int, each: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Conv2d(inputs, each, 3, padding=d, dilation=d, bias=False) for d in (1, 2, 4))
        self.whole = nn.Conv2d(inputs, each, 1)
        self.norm = nn.BatchNorm2d(3 * each)
        self.join = nn.Conv2d(4 * each, 2 * each, 1)

    def forward(self, x: Tensor) -> Tensor:
        near = F.relu(self.norm(torch.cat([branch(x) for branch in self.branches], 1)))
        mean = F.relu(self.whole(x.mean((2, 3), keepdim=True))).expand(-1, -1, *x.shape[2:])
        return F.relu(self.join(torch.cat([near, mean], 1)))


def mean_overlap(model: nn.Module, data: Batch) -> float:
    """Of the pixels that are or are called a ground the share that is both, mean over grounds."""
    found, label = model(data[0]).argmax(1), data[1]
    found = torch.where(label == UNKNOWN, UNKNOWN, found)
    shares = [
        ((found == k) & (label == k)).sum().item() / max(((found == k) | (label == k)).sum().item(), 1)
        for k in range(GROUNDS)
    ]
    return 100 * sum(shares) / GROUNDS


@suite_task("dense prediction", "mean overlap %", "higher", steps=250, batch_size=12, sealed=True)
def land_cover_map() -> Setup:
    """Which ground each pixel shows, in half the resolution and back; unlabelled pixels do not count."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], ignore_index=UNKNOWN)

    model = nn.Sequential(
        nn.Conv2d(1, 16, 5, 2, padding=2, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        Pyramid(16, 12),
        nn.Conv2d(24, GROUNDS, 1),
        nn.Upsample(scale_factor=2, mode="bilinear"),
    )
    return Setup(model, land(), loss, mean_overlap, chance=100 / GROUNDS / GROUNDS)


def crowds(number: int = 1600, size: int = 20) -> Splits:
    """Small heads of different light, partly hidden, on a mottled ground; the target is a bump of mass 1 for each."""
    source = generator(173)
    most = 12
    grid = torch.arange(size, dtype=torch.float32)
    place = size * torch.rand(number, most, 2, generator=source)
    there = (torch.arange(most) < torch.randint(1, most + 1, (number, 1), generator=source)).float()
    down = (grid - place[:, :, :1]).square()[:, :, :, None]
    right = (grid - place[:, :, 1:]).square()[:, :, None, :]
    bump = torch.exp(-(down + right) / (2 * 1.2**2))
    density = (there[:, :, None, None] * bump / bump.sum((2, 3), keepdim=True)).sum(1, keepdim=True)
    light = (there * (0.6 + 0.8 * torch.rand(number, most, generator=source)))[:, :, None, None]
    heads = (light * (down + right < 2.2).float()).amax(1, keepdim=True)
    ground = F.interpolate(torch.randn(number, 1, 6, 6, generator=source), size=size, mode="bilinear")
    x = heads + 0.4 * ground + 0.2 * torch.randn(number, 1, size, size, generator=source)
    return split((x, 100 * density), 200, 400)


@suite_task("dense prediction", "absolute error", "lower", steps=350, batch_size=16, sealed=True)
def crowd_density() -> Setup:
    """How many heads, by the squared error of a map of their density times 100; the metric is the error of the sum."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1])

    def count(density: Tensor) -> Tensor:
        return density.sum((1, 2, 3)) / 100

    def measure(model: nn.Module, data: Batch) -> float:
        return (count(model(data[0])) - count(data[1])).abs().mean().item()

    splits = crowds()
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, 12), (12, 16), (16, 16)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Conv2d(16, 1, 1))
    chance = (count(splits.test[1]) - count(splits.train[1]).median()).abs().mean().item()
    return Setup(model, splits, loss, measure, chance)


TASKS = (optical_flow, land_cover_map, crowd_density)
