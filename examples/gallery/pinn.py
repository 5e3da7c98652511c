"""A differential equation: `python examples/gallery/pinn.py --out pictures`.

u'' = -(3 pi)^2 sin(3 pi x) on [0, 1] with u(0) = u(1) = 0, solved by a physics-informed network: the loss is the mean
square of the equation's residual, with the second derivative of autograd.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from drawing import arguments, picture
from torch import Tensor, nn

from ddpnopt import DDPNOpt

WAVES = 3 * math.pi


class Solution(nn.Module):
    """The factor x (1 - x) fulfils the boundary conditions."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 - x) * self.layers(6 * x - 3)


def derivative(u: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(u.sum(), x, create_graph=True)[0]


def residual(model: nn.Module, x: Tensor) -> Tensor:
    x = x.requires_grad_()
    u_xx = derivative(derivative(model(x), x), x)
    return u_xx / WAVES**2 + torch.sin(WAVES * x.detach())


def main(steps: int = 100, out: Path | None = None) -> float:
    torch.manual_seed(0)
    model = Solution()
    opt = DDPNOpt(model)
    losses = []
    for _ in range(steps):
        x = torch.rand(64, 1)
        opt.zero_grad()
        loss = residual(model, x).square().mean()
        loss.backward()
        opt.step()
        losses.append(loss.item())
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
    print(f"largest error {main(**arguments()):.1e}")
