"""Patches by other means: attention within windows that are shifted, and a gate across places."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt.lab.suite.convolution_kinds import textures
from ddpnopt.lab.suite.data import generator, split
from ddpnopt.lab.suite.fully_connected import classifier
from ddpnopt.lab.suite.task import Setup, Splits, suite_task

SIDE = 4


class WindowBlock(nn.Module):
    """Swin's block: attention within windows of 4x4 with a bias by relative place, then a GELU network."""

    def __init__(self, width: int, heads: int, shift: int) -> None:
        super().__init__()
        self.heads, self.shift = heads, shift
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.bias = nn.Parameter(0.02 * torch.randn((2 * SIDE - 1) ** 2, heads))
        row, column = torch.arange(SIDE**2) // SIDE, torch.arange(SIDE**2) % SIDE
        down, right = row[:, None] - row + SIDE - 1, column[:, None] - column + SIDE - 1
        self.relative: Tensor
        self.register_buffer("relative", (2 * SIDE - 1) * down + right)

    def _attended(self, x: Tensor) -> Tensor:
        """Windows as rows: (windows, places, width)."""
        windows, places, width = x.shape
        q, k, v = self.qkv(x).view(windows, places, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        bias = self.bias[self.relative].permute(2, 0, 1)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None])
        return self.out(attended.transpose(1, 2).reshape(windows, places, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, height, across, width = x.shape
        h = self.norm1(x).roll((-self.shift, -self.shift), (1, 2))
        h = h.view(batch, height // SIDE, SIDE, across // SIDE, SIDE, width).transpose(2, 3)
        h = self._attended(h.reshape(-1, SIDE**2, width))
        h = h.view(batch, height // SIDE, across // SIDE, SIDE, SIDE, width).transpose(2, 3).reshape(x.shape)
        x = x + h.roll((self.shift, self.shift), (1, 2))
        return x + self.mlp(self.norm2(x))


class SmallSwin(nn.Module):
    """Patches of 2x2, two blocks, four neighbours merged into one, one block, mean over places."""

    def __init__(self, channels: int, classes: int, width: int = 24) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, width, 2, 2)
        self.fine = nn.Sequential(WindowBlock(width, 2, 0), WindowBlock(width, 2, SIDE // 2))
        self.merge, self.merge_norm = nn.Linear(4 * width, 48, bias=False), nn.LayerNorm(4 * width)
        self.coarse, self.norm = WindowBlock(48, 3, 0), nn.LayerNorm(48)
        self.head = nn.Linear(48, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fine(self.patches(x).permute(0, 2, 3, 1))
        corners = [x[:, top::2, left::2] for top in range(2) for left in range(2)]
        x = self.coarse(self.merge(self.merge_norm(torch.cat(corners, 3))))
        return self.head(self.norm(x).mean((1, 2)))


def noisier(splits: Splits, noise: float) -> Splits:
    """The same pictures with more noise."""
    source = generator(191)
    parts = (splits.train, splits.validation, splits.test)
    return Splits(*((x + noise * torch.randn(x.shape, generator=source), y) for x, y in parts))


@suite_task("patches", "accuracy %", "higher", steps=250, batch_size=32, sealed=True)
def swin_windows() -> Setup:
    """Which of nine textures in much noise, by attention within shifted windows."""
    return classifier(SmallSwin(1, 9), noisier(textures(3600, 16), 1.0))


def calls(number: int = 3200, bands: int = 16, frames: int = 16) -> Splits:
    """Pictures of sounds, bands by frames: tones that rise, fall, tremble, jump, are double or whispered."""
    source = generator(161)
    label = torch.randint(6, (number,), generator=source)
    hop = 32
    time = torch.linspace(0, 1, hop * (frames + 1))

    def drawn(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(number, 1, generator=source)

    base, change, rate = drawn(0.1, 0.2), drawn(0.05, 0.15), drawn(3, 5)
    wave = torch.sin(2 * torch.pi * (rate * time + drawn(0, 1)))
    courses = [base + change * time, base + change * (1 - time), base + 0.4 * change * wave]
    courses += [base + change * (wave > 0), base.expand_as(wave), base.expand_as(wave)]
    pitch = torch.stack(courses, 1)[torch.arange(number), label]
    phase = 2 * torch.pi * pitch.cumsum(1)
    second = torch.sin(1.5 * phase) * (label == 4)[:, None]
    hiss = torch.randn(number, len(time), generator=source)
    tone = torch.where((label == 5)[:, None], hiss * (0.5 + 0.5 * wave), torch.sin(phase) + second)
    sound = tone + 1.1 * torch.randn(number, len(time), generator=source)
    window = sound.unfold(1, 2 * hop, hop) * torch.hann_window(2 * hop)
    power = torch.fft.rfft(window).abs()[:, :, 1 : 2 * bands + 1].square().unflatten(2, (bands, 2)).mean(3)
    return split((((power + 1e-3).log() - 2.5).transpose(1, 2)[:, None] / 2, label), 500, 900)


class SpatialGate(nn.Module):
    """gMLP's block: half of the channels, mixed across places, weigh the other half."""

    def __init__(self, places: int, width: int) -> None:
        super().__init__()
        self.norm, self.gate_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.widen, self.narrow = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.across = nn.Linear(places, places)
        nn.init.normal_(self.across.weight, std=1e-3)
        nn.init.ones_(self.across.bias)

    def forward(self, x: Tensor) -> Tensor:
        kept, gate = F.gelu(self.widen(self.norm(x))).chunk(2, 2)
        gate = self.across(self.gate_norm(gate).transpose(1, 2)).transpose(1, 2)
        return x + self.narrow(kept * gate)


class GatedPatches(nn.Module):
    """Patches of 4x4, three blocks, mean over patches."""

    def __init__(self, classes: int, width: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 4, 4)
        self.blocks = nn.Sequential(*[SpatialGate(16, width) for _ in range(3)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(x)).mean(1))


@suite_task("patches", "accuracy %", "higher", steps=400, batch_size=32, sealed=True)
def gmlp_calls() -> Setup:
    """Calls by the pictures of their sound (gMLP)."""
    return classifier(GatedPatches(6), calls())


TASKS = (swin_windows, gmlp_calls)
