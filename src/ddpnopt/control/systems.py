"""Small systems to try a solver on: pendulum, unicycle, cart-pole. Each gives the problem and where to
start."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .problem import Problem


@dataclass(frozen=True)
class ControlTask:
    """A problem with a start: x0 (n,), u0 (T, m), and the names of the components for plots."""

    problem: Problem
    x0: Tensor
    u0: Tensor
    dt: float
    states: tuple[str, ...]
    controls: tuple[str, ...]


def unicycle(*, T: int = 20, dt: float = 0.1, limit: float | None = None) -> ControlTask:
    """Parking: drive x = (position, heading) from (-1, -1, 1) to zero with speed v and turn rate w.

    x+ = x + dt (v cos th, v sin th, w), cost (100 |x|^2 + |u|^2) / 2 per step without dt, 50 |x|^2 at the
    end.
    """

    def f(x: Tensor, u: Tensor) -> Tensor:
        v, w, th = u[0], u[1], x[2]
        return x + dt * torch.stack([v * torch.cos(th), v * torch.sin(th), w])

    def cost(x: Tensor, u: Tensor) -> Tensor:
        return 0.5 * (100 * (x * x).sum() + (u * u).sum())

    def phi(x: Tensor) -> Tensor:
        return 50 * (x * x).sum()

    lower = None if limit is None else -limit
    return ControlTask(
        Problem(f, cost, phi, T, lower=lower, upper=limit),
        torch.tensor([-1.0, -1.0, 1.0], dtype=torch.float64),
        torch.zeros(T, 2, dtype=torch.float64),
        dt,
        ("x", "y", "heading"),
        ("speed", "turn rate"),
    )


def pendulum(*, T: int = 60, dt: float = 0.05, limit: float | None = None, effort: float = 0.1) -> ControlTask:
    """Swing-up: x = (angle, rate), angle 0 hanging, pi upright; u is a torque on a unit mass on a unit rod, g
    = 9.81.

    The rate is updated first and then moves the angle (symplectic Euler), so a free pendulum keeps its
    energy.
    """

    def f(x: Tensor, u: Tensor) -> Tensor:
        rate = x[1] + dt * (u[0] - 9.81 * torch.sin(x[0]) - 0.1 * x[1])
        return torch.stack([x[0] + dt * rate, rate])

    def cost(x: Tensor, u: Tensor) -> Tensor:
        return dt * (1 + torch.cos(x[0]) + 0.05 * x[1] ** 2 + effort * u[0] ** 2)

    def phi(x: Tensor) -> Tensor:
        return 100 * (1 + torch.cos(x[0])) + 10 * x[1] ** 2

    lower = None if limit is None else -limit
    return ControlTask(
        Problem(f, cost, phi, T, lower=lower, upper=limit),
        torch.zeros(2, dtype=torch.float64),
        torch.full((T, 1), 0.1, dtype=torch.float64),  # hanging still with no torque is a stationary point
        dt,
        ("angle", "rate"),
        ("torque",),
    )


def cartpole(*, T: int = 80, dt: float = 0.04, limit: float | None = None) -> ControlTask:
    """Swing-up: x = (position, angle, speed, rate), angle 0 hanging, pi upright; u is the force on the cart.

    Cart 1 kg, pole 0.3 kg at 0.5 m, no friction.
    """
    M, mass, length, g = 1.0, 0.3, 0.5, 9.81

    def f(x: Tensor, u: Tensor) -> Tensor:
        th, speed, rate = x[1], x[2], x[3]
        s, c = torch.sin(th), torch.cos(th)
        acceleration = (u[0] + mass * s * (length * rate**2 + g * c)) / (M + mass * s**2)
        angular = -(acceleration * c + g * s) / length
        speed, rate = speed + dt * acceleration, rate + dt * angular
        return torch.stack([x[0] + dt * speed, th + dt * rate, speed, rate])

    def cost(x: Tensor, u: Tensor) -> Tensor:
        return dt * (0.5 * x[0] ** 2 + 1 + torch.cos(x[1]) + 0.01 * u[0] ** 2)

    def phi(x: Tensor) -> Tensor:
        return 100 * (x[0] ** 2 + 2 * (1 + torch.cos(x[1]))) + 10 * (x[2] ** 2 + x[3] ** 2)

    lower = None if limit is None else -limit
    return ControlTask(
        Problem(f, cost, phi, T, lower=lower, upper=limit),
        torch.zeros(4, dtype=torch.float64),
        torch.full((T, 1), 0.1, dtype=torch.float64),  # hanging still with no force is a stationary point
        dt,
        ("position", "angle", "speed", "rate"),
        ("force",),
    )


def hanging_starts(B: int, *, spread: float = 0.5, seed: int = 0) -> Tensor:
    """B starts of the pendulum around hanging at rest, (B, 2)."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(B, 2, generator=generator, dtype=torch.float64)
    return spread * noise * torch.tensor([1.0, math.sqrt(9.81)], dtype=torch.float64)
