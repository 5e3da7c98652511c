"""Pictures to be counted or added: channels weighted by their content, wide depthwise filters with layer norm."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt.lab.suite.data import digits, generator, split
from ddpnopt.lab.suite.fully_connected import classifier
from ddpnopt.lab.suite.task import Batch, Setup, Splits, suite_task


@lru_cache
def blobs(number: int = 3600, size: int = 18) -> Splits:
    """One to six soft blobs of different size and brightness in noise; the label is their number less one."""
    source = generator(85)
    label = torch.randint(6, (number,), generator=source)
    # Cells of a 3x3 grid, so that blobs rarely merge: (number, 6) of 9.
    cell = torch.rand(number, 9, generator=source).argsort(1)[:, :6]
    corner = torch.stack([cell // 3, cell % 3], 2) * (size / 3)
    centre = corner + 1.5 + (size / 3 - 3) * torch.rand(number, 6, 2, generator=source)
    width = 0.8 + 0.6 * torch.rand(number, 6, generator=source)
    height = (0.6 + 0.6 * torch.rand(number, 6, generator=source)) * (torch.arange(6) <= label[:, None])
    axis = torch.arange(size, dtype=torch.float32)
    rows = torch.exp(-((axis - centre[..., :1]) ** 2) / (2 * width[..., None] ** 2))
    columns = torch.exp(-((axis - centre[..., 1:]) ** 2) / (2 * width[..., None] ** 2))
    x = torch.einsum("nk,nkr,nkc->nrc", height, rows, columns)
    x = x + 0.15 * torch.randn(number, size, size, generator=source)
    return split((x[:, None], label), 500, 800)


class Squeezed(nn.Module):
    """A strided convolution whose channels are scaled by a small network of their means."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, stride, padding=1)
        self.squeeze, self.excite = nn.Linear(outputs, 8), nn.Linear(8, outputs)

    def forward(self, x: Tensor) -> Tensor:
        h = F.hardswish(self.conv(x))
        gate = torch.sigmoid(self.excite(F.relu(self.squeeze(h.mean((2, 3))))))
        return h * gate[:, :, None, None]


@suite_task("convolutional", "accuracy %", "higher", steps=300, batch_size=40)
def squeeze_excitation() -> Setup:
    """How many blobs are there? Three strided convolutions with squeeze and excitation."""
    model = nn.Sequential(
        Squeezed(1, 16, 1),
        Squeezed(16, 24, 2),
        Squeezed(24, 32, 2),
        nn.Flatten(),
        nn.Linear(32 * 25, 6),
    )
    return classifier(model, blobs())


@lru_cache
def digit_pairs(copies: int = 6) -> Splits:
    """Two digits side by side, 8x16; the label is their sum. Held-out pairs are of held-out digits."""
    source = generator(86)

    def paired(data: Batch, number: int) -> Batch:
        pictures, labels = data
        left, right = torch.randint(len(labels), (2, number), generator=source)
        return torch.cat([pictures[left], pictures[right]], 2)[:, None], labels[left] + labels[right]

    parts = digits()
    return Splits(paired(parts.train, copies * 1000), paired(parts.validation, 500), paired(parts.test, 800))


class Wide(nn.Module):
    """ConvNeXt's block: 7x7 within each channel, layer norm across channels, two layers, a learned small scale."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.spread = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.widen, self.narrow = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.spread(x).permute(0, 2, 3, 1))
        h = self.scale * self.narrow(F.gelu(self.widen(h)))
        return x + h.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """Patches of 2x2, two blocks, a strided convolution, one block, mean over places."""

    def __init__(self, classes: int, width: int = 24) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, width, 2, 2), Wide(width), Wide(width), nn.Conv2d(width, 2 * width, 2, 2), Wide(2 * width)
        )
        self.norm, self.head = nn.LayerNorm(2 * width), nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(x).mean((2, 3))))


@suite_task("residual", "accuracy %", "higher", steps=400, batch_size=48)
def convnext_sums() -> Setup:
    """The sum of two digits, 0 to 18."""
    return classifier(ConvNeXt(19), digit_pairs())


TASKS = (squeeze_excitation, convnext_sums)
