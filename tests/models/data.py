"""Small data sets that can be learnt, made of random numbers."""

from __future__ import annotations

import torch
from torch import Tensor


def images(count: int = 64, classes: int = 4, channels: int = 3, size: int = 16) -> tuple[Tensor, Tensor]:
    """Noisy copies of one pattern per class."""
    patterns = torch.randn(classes, channels, size, size)
    y = torch.arange(count) % classes
    return patterns[y] + 1.0 * torch.randn(count, channels, size, size), y


def vectors(count: int = 64, features: int = 10, classes: int = 4) -> tuple[Tensor, Tensor]:
    centres = torch.randn(classes, features)
    y = torch.arange(count) % classes
    return centres[y] + 0.7 * torch.randn(count, features), y


def tokens(count: int = 32, length: int = 12, words: int = 40) -> Tensor:
    """Sequences of a random rule: each word has two followers."""
    followers = torch.randint(3, words, (words, 2))
    now = torch.randint(3, words, (count,))
    found = [now]
    for _ in range(length - 1):
        now = followers[now, torch.randint(2, (count,))]
        found.append(now)
    return torch.stack(found, 1)


def waves(count: int = 32, length: int = 400, classes: int = 4) -> tuple[Tensor, Tensor]:
    """Tones of different pitch."""
    y = torch.arange(count) % classes
    t = torch.linspace(0, 1, length)
    pitch = 10.0 * (y + 1)[:, None] + torch.rand(count, 1)
    return torch.sin(6.283 * pitch * t + 6.283 * torch.rand(count, 1)) + 0.1 * torch.randn(count, length), y


def split(size: int, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Batches of equal size."""
    return list(zip(*(t.split(size) for t in tensors), strict=True))
