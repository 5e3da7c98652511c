"""Data of the suite: scikit-learn's digits and pictures drawn from a seed, split into train, validation and test.

The data of a task is always the same; a run's seed sets the weights and the order of the batches.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor

from ddpnopt.lab.suite.task import Augment, Batch, Splits


def generator(seed: int) -> torch.Generator:
    """A generator of its own for each data set."""
    return torch.Generator().manual_seed(seed)


def split(tensors: Batch, validation: int, test: int, seed: int = 0) -> Splits:
    """Rows at random into the three splits; what validation and test leave is for training."""
    order = torch.randperm(len(tensors[0]), generator=generator(seed))
    parts = order[validation + test :], order[:validation], order[validation : validation + test]
    train, held_out, final = (tuple(tensor[rows] for tensor in tensors) for rows in parts)
    return Splits(train, held_out, final)


def standardised(train: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Mean 0 and deviation 1 on the training rows, the others by the same numbers."""
    mean, deviation = train.mean(0), train.std(0).clamp_min(1e-6)
    return tuple((x - mean) / deviation for x in (train, *others))


@lru_cache
def digits() -> Splits:
    """1,000 / 397 / 400 pictures of 8x8, in [0, 1]."""
    bunch = load_digits()
    pictures = torch.tensor(bunch.images, dtype=torch.float32) / 16
    return split((pictures, torch.tensor(bunch.target)), 397, 400)


@lru_cache
def flat_digits(noise: float = 0.0) -> Splits:
    """Digits as rows of 64 numbers, with pixel noise where asked."""
    source = generator(1)

    def flatten(data: Batch) -> Batch:
        x = data[0].flatten(1)
        return x + noise * torch.randn(x.shape, generator=source), data[1]

    parts = digits()
    return Splits(flatten(parts.train), flatten(parts.validation), flatten(parts.test))


@lru_cache
def scattered_digits(canvas: int = 14, noise: float = 0.15, copies: int = 4) -> Splits:
    """Digits somewhere on a larger, noisy canvas; held-out pictures stem from held-out digits."""
    source = generator(2)

    def scatter(data: Batch, copies: int) -> Batch:
        pictures, labels = (tensor.repeat_interleave(copies, 0) for tensor in data)
        x = noise * torch.randn(len(pictures), 1, canvas, canvas, generator=source)
        corners = torch.randint(canvas - 7, (len(pictures), 2), generator=source).tolist()
        for row, (top, left) in enumerate(corners):
            x[row, 0, top : top + 8, left : left + 8] += pictures[row]
        return x, labels

    parts = digits()
    return Splits(scatter(parts.train, copies), scatter(parts.validation, 1), scatter(parts.test, 2))


def draw_shape(kind: Tensor, size: int, source: torch.Generator) -> Tensor:
    """Masks (n, size, size) of discs, squares, crosses and rings by `kind` 0 to 3, of random place, size and angle."""
    n = len(kind)
    axis = torch.arange(size, dtype=torch.float32)
    centre = size / 2 + (torch.rand(n, 2, generator=source) - 0.5) * size * 0.4
    radius = (size * (0.2 + 0.12 * torch.rand(n, generator=source)))[:, None, None]
    angle = (torch.rand(n, generator=source) * torch.pi / 2)[:, None, None]
    dy = axis[None, :, None] - centre[:, 0, None, None]
    dx = axis[None, None, :] - centre[:, 1, None, None]
    u, v = angle.cos() * dx + angle.sin() * dy, angle.cos() * dy - angle.sin() * dx
    distance = (dx**2 + dy**2).sqrt()
    square = torch.maximum(u.abs(), v.abs()) < 0.85 * radius
    cross = (torch.minimum(u.abs(), v.abs()) < 0.35 * radius) & (torch.maximum(u.abs(), v.abs()) < 1.2 * radius)
    ring = (distance < 1.1 * radius) & (distance > 0.6 * radius)
    every = torch.stack([distance < radius, square, cross, ring], 1)
    return every[torch.arange(n), kind].float()


def stripes(direction: Tensor, size: int, source: torch.Generator) -> Tensor:
    """Waves (n, size, size) that run along one of two diagonals, of random phase."""
    axis = torch.arange(size, dtype=torch.float32)
    along = axis[None, None, :] + axis[None, :, None] * (1 - 2 * direction.float())[:, None, None]
    return torch.sin(1.3 * along + 6.3 * torch.rand(len(direction), 1, 1, generator=source))


@lru_cache
def textured_shapes(size: int = 16, noise: float = 0.2, number: int = 4100) -> Splits:
    """Colour pictures of a shape filled with stripes: eight classes, four shapes times two directions."""
    source = generator(3)
    label = torch.randint(8, (number,), generator=source)
    mask, texture = draw_shape(label // 2, size, source), stripes(label % 2, size, source)
    ink, ground = (torch.rand(number, 3, 1, 1, generator=source) - 0.5 for _ in range(2))
    inside = (mask * (1 + 0.5 * texture))[:, None]
    x = (
        ground
        + inside * (1.2 * ink.sign() * (0.4 + ink.abs()))
        + noise * torch.randn(number, 3, size, size, generator=source)
    )
    return split((x, label), 500, 600)


@lru_cache
def cluttered_masks(size: int = 16, number: int = 900) -> Splits:
    """Grey pictures of two shapes, a disc or ring to be segmented and a square or cross to be left alone."""
    source = generator(4)
    wanted = torch.randint(2, (number,), generator=source) * 3
    other = 1 + torch.randint(2, (number,), generator=source)
    target, clutter = draw_shape(wanted, size, source), draw_shape(other, size, source)
    x = torch.maximum(target, clutter) + 0.4 * torch.randn(number, size, size, generator=source)
    return split((x[:, None], target[:, None]), 150, 250)


def add_noise(scale: float) -> Augment:
    """Noise that differs each time a sample is seen, so that a better fit is a better model."""

    def augment(batch: Batch, source: torch.Generator) -> Batch:
        x, *rest = batch
        return x + scale * torch.randn(x.shape, generator=source), *rest

    return augment


def jitter_and_flip(batch: Batch, source: torch.Generator) -> Batch:
    """Shift each picture by up to two pixels and mirror half of them about the main diagonal."""
    x, y = batch
    size = x.shape[-1]
    padded = F.pad(x, (2, 2, 2, 2), mode="reflect")
    shifts = torch.randint(5, (len(x), 2), generator=source).tolist()
    moved = torch.stack(
        [picture[:, top : top + size, left : left + size] for picture, (top, left) in zip(padded, shifts, strict=True)]
    )
    mirrored = torch.rand(len(x), 1, 1, 1, generator=source) < 0.5
    return torch.where(mirrored, moved.transpose(-1, -2), moved), y
