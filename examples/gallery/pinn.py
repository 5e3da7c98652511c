"""A differential equation: `python examples/gallery/pinn.py --out pictures`.

u'' = -(3 pi)^2 sin(3 pi x) on [0, 1] with u(0) = u(1) = 0, solved by a network that sees each point with its two
neighbours: the second derivative is their difference quotient, so that one backward pass suffices. Dimension 0 is the
sample, here a point; the neighbours are in dimension 1.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from drawing import arguments, picture
from torch import Tensor, nn

from ddpnopt import DDPNOpt

WAVES = 3 * math.pi
GAP = 0.01


class Solution(nn.Module):
    """The factor x (1 - x) fulfils the boundary conditions."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 - x) * self.layers(6 * x - 3)


def residual(model: nn.Module, x: Tensor) -> Tensor:
    stencil = torch.stack([x - GAP, x, x + GAP], 1)
    left, here, right = model(stencil).unbind(1)
    return ((left - 2 * here + right) / GAP**2 + WAVES**2 * torch.sin(WAVES * x)) / WAVES**2


def main(steps: int = 400, out: Path | None = None) -> float:
    torch.manual_seed(0)
    model = Solution()
    opt = DDPNOpt(model)
    losses = []
    for _ in range(steps):
        x = GAP + (1 - 2 * GAP) * torch.rand(64, 1)
        opt.zero_grad()
        loss = residual(model, x).square().mean()
        loss.backward()
        opt.step(loss=loss)  # a squared error of the outputs' differences: its scale has to be told
        losses.append(loss.item())
    opt.eval()
    places = torch.linspace(0, 1, 200)[:, None]
    with torch.no_grad():
        found = model(places)
    exact = torch.sin(WAVES * places)
    if out is not None:
        with picture(
            out / "gallery-pinn", "A differential equation: loss, and the solution", losses, 1, axes_shown=True
        ) as [axis]:
            axis.plot(places, exact, color="#8f98a3", linewidth=4, label="exact")
            axis.plot(places, found, color="#c8381e", linewidth=1.6, label="network")
            axis.legend()
    return (found - exact).abs().max().item()


if __name__ == "__main__":
    print(f"largest error {main(**arguments()):.3f}")
