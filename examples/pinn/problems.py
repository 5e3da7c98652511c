"""Two boundary value problems for physics-informed networks, with their exact solutions.

A problem draws points, and computes the loss of a network at them: the mean square of the equation's residual in the
interior, and of the difference from the given values at the boundary. All derivatives are those of autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

Points = tuple[Tensor, ...]


@dataclass(frozen=True)
class Problem:
    """Points, the loss there, and the solution on a grid."""

    name: str
    title: str
    draw: Callable[[], Points]
    loss: Callable[[nn.Module, Points], Tensor]
    places: Tensor  # (n, 2)
    solution: Tensor  # (n, 1)
    shape: tuple[int, int]  # of the grid

    def error(self, model: nn.Module) -> float:
        """In the L2 norm, relative to the solution."""
        with torch.no_grad():
            return float((model(self.places) - self.solution).norm() / self.solution.norm())


def network(width: int = 32) -> nn.Module:
    return nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))


def derivative(u: Tensor, x: Tensor) -> Tensor:
    """Of each sample's u by its own x: the samples do not depend on each other."""
    return torch.autograd.grad(u.sum(), x, create_graph=True)[0]


def poisson(interior: int = 400, boundary: int = 100) -> Problem:
    """u_xx + u_yy = -2 pi^2 sin(pi x) sin(pi y) on the unit square, u = 0 at its boundary."""

    def draw() -> Points:
        edge, along = torch.randint(4, (boundary,)), torch.rand(boundary)
        ends = (edge % 2).float()
        across = edge < 2
        return torch.rand(interior, 2), torch.stack(
            [torch.where(across, ends, along), torch.where(across, along, ends)], 1
        )

    def loss(model: nn.Module, points: Points) -> Tensor:
        inside, edge = points
        x = inside.clone().requires_grad_()
        slope = derivative(model(x), x)
        laplacian = derivative(slope[:, 0], x)[:, 0] + derivative(slope[:, 1], x)[:, 1]
        source = 2 * math.pi**2 * torch.sin(math.pi * inside).prod(1)
        return (laplacian + source).square().mean() + model(edge).square().mean()

    places = _grid(0, 1, 41, 0, 1, 41)
    return Problem(
        "poisson", "Poisson", draw, loss, places, torch.sin(math.pi * places).prod(1, keepdim=True), (41, 41)
    )


def burgers(interior: int = 400, boundary: int = 50, viscosity: float = 0.05) -> Problem:
    """u_t + u u_x = nu u_xx for t in [0, 1], x in [-1, 1], u(0, x) = -sin(pi x), u(t, -1) = u(t, 1) = 0."""

    def draw() -> Points:
        inside = torch.rand(interior, 2) * torch.tensor([1.0, 2.0]) - torch.tensor([0.0, 1.0])
        start = torch.stack([torch.zeros(boundary), 2 * torch.rand(boundary) - 1], 1)
        ends = torch.stack([torch.rand(boundary), 2 * (torch.arange(boundary) % 2).float() - 1], 1)
        return inside, start, ends

    def loss(model: nn.Module, points: Points) -> Tensor:
        inside, start, ends = points
        x = inside.clone().requires_grad_()
        u = model(x)
        slope = derivative(u, x)
        u_xx = derivative(slope[:, 1], x)[:, 1]
        residual = slope[:, 0] + u[:, 0] * slope[:, 1] - viscosity * u_xx
        at_start = model(start) + torch.sin(math.pi * start[:, 1:])
        return residual.square().mean() + at_start.square().mean() + model(ends).square().mean()

    places = _grid(0, 1, 41, -1, 1, 101)
    return Problem("burgers", "Burgers", draw, loss, places, _cole_hopf(places, viscosity), (41, 101))


def _grid(a: float, b: float, m: int, c: float, d: float, n: int) -> Tensor:
    return torch.cartesian_prod(torch.linspace(a, b, m), torch.linspace(c, d, n))


def _cole_hopf(places: Tensor, viscosity: float) -> Tensor:
    """The solution of Burgers' equation, an integral over a Gaussian (Hopf 1950, Cole 1951), by quadrature."""
    nodes, weights = np.polynomial.hermite.hermgauss(100)
    t, x = places.double().numpy().T
    y = x[:, None] - 2 * np.sqrt(viscosity * t)[:, None] * nodes
    exponent = -np.cos(np.pi * y) / (2 * np.pi * viscosity)
    f = weights * np.exp(exponent - exponent.max(1, keepdims=True))
    return torch.tensor(-(np.sin(np.pi * y) * f).sum(1) / f.sum(1), dtype=torch.float32)[:, None]


PROBLEMS = {"poisson": poisson, "burgers": burgers}
