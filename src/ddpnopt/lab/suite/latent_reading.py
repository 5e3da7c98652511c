"""A few learned vectors that read many inputs by attention (Perceiver)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt.lab.suite.data import digits, generator
from ddpnopt.lab.suite.fully_connected import classifier
from ddpnopt.lab.suite.task import Batch, Setup, Splits, suite_task


def glimpses(pixels: int = 40, copies: int = 3) -> Splits:
    """Digits by 40 of their 64 pixels, in any order: brightness and place of each."""
    source = generator(125)
    axis = torch.linspace(-1, 1, 8)
    place = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), 2).flatten(0, 1)
    waves = torch.cat([place, torch.sin(torch.pi * place), torch.cos(torch.pi * place), torch.sin(6 * place)], 1)

    def seen(data: Batch, copies: int) -> Batch:
        pictures, labels = (tensor.repeat_interleave(copies, 0) for tensor in data)
        chosen = torch.rand(len(pictures), 64, generator=source).argsort(1)[:, :pixels]
        light = pictures.flatten(1).gather(1, chosen)
        return torch.cat([2 * light[..., None] - 1, waves[chosen]], 2), labels

    parts = digits()
    return Splits(seen(parts.train, copies), seen(parts.validation, 1), seen(parts.test, 2))


class Reader(nn.Module):
    """Eight latents attend to the pixels, then to each other, twice with the same weights."""

    def __init__(self, inputs: int, classes: int, latents: int = 8, width: int = 32) -> None:
        super().__init__()
        self.latents = nn.Parameter(0.2 * torch.randn(latents, width))
        self.lift = nn.Linear(inputs, width)
        self.reading = nn.MultiheadAttention(width, 2, batch_first=True)
        self.thinking = nn.MultiheadAttention(width, 2, batch_first=True)
        self.before, self.between, self.after = nn.LayerNorm(width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.widen, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        pixels = self.lift(x)
        z = self.latents.expand(len(x), -1, -1)
        for _ in range(2):
            z = z + self.reading(self.before(z), pixels, pixels, need_weights=False)[0]
            h = self.between(z)
            z = z + self.thinking(h, h, h, need_weights=False)[0]
            z = z + self.narrow(F.gelu(self.widen(self.after(z))))
        return self.head(z.mean(1))


@suite_task("patches", "accuracy %", "higher", steps=450, batch_size=32)
def perceiver_pixels() -> Setup:
    """Digits of which more than a third of the pixels is not seen."""
    return classifier(Reader(9, 10), glimpses())


TASKS = (perceiver_pixels,)
