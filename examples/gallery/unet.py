"""Segmentation with a U-Net: `python examples/gallery/unet.py --out pictures`. It finds discs in noise."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from drawing import arguments, picture
from torch import Tensor, nn

from ddpnopt import DDPNOpt

SIZE = 24


def double(before: int, after: int) -> nn.Module:
    layers = nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(4, after), nn.ReLU()
    again = nn.Conv2d(after, after, 3, padding=1), nn.GroupNorm(4, after), nn.ReLU()
    return nn.Sequential(*layers, *again)


class UNet(nn.Module):
    """Down twice and up again, with shortcuts across."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.top, self.middle, self.bottom = double(1, width), double(width, 2 * width), double(2 * width, 4 * width)
        self.up_middle, self.up_top = double(6 * width, 2 * width), double(3 * width, width)
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        top = self.top(x)
        middle = self.middle(F.max_pool2d(top, 2))
        bottom = self.bottom(F.max_pool2d(middle, 2))
        middle = self.up_middle(torch.cat([F.interpolate(bottom, scale_factor=2), middle], 1))
        return self.head(self.up_top(torch.cat([F.interpolate(middle, scale_factor=2), top], 1)))


def discs(count: int) -> tuple[Tensor, Tensor]:
    """Noisy images with a disc each, and where it is."""
    grid = torch.arange(SIZE).float()
    centre, radius = SIZE * (0.2 + 0.6 * torch.rand(count, 2, 1, 1)), 3 + 4 * torch.rand(count, 1, 1)
    inside = (grid[:, None] - centre[:, 0]) ** 2 + (grid[None, :] - centre[:, 1]) ** 2 < radius**2
    mask = inside.float()[:, None]
    return mask + 0.8 * torch.randn(count, 1, SIZE, SIZE), mask


def main(steps: int = 60, out: Path | None = None) -> float:
    torch.manual_seed(0)
    model = UNet()
    opt = DDPNOpt(model)
    losses = []
    for _ in range(steps):
        x, mask = discs(16)
        opt.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(x), mask)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    opt.eval()
    x, mask = discs(64)
    with torch.no_grad():
        found = model(x) > 0
    both, either = (found & mask.bool()).sum(), (found | mask.bool()).sum()
    if out is not None:
        with picture(out / "gallery-unet", "U-Net: loss; images above, truth, answers below", losses, 12) as axes:
            shown = [*x[:4, 0], *mask[:4, 0], *found[:4, 0].float()]
            for axis, image in zip(axes, shown, strict=True):
                axis.imshow(image, cmap="gray", vmin=-1, vmax=2)
    return (both / either).item()


if __name__ == "__main__":
    print(f"intersection over union {main(**arguments()):.1%}")
