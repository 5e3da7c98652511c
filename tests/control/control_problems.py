"""Small problems shared by the tests of the control package."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ddpnopt.control import Problem


@dataclass(frozen=True)
class LinearQuadratic:
    """x+ = A_t x + B_t u + c_t, cost 1/2 z' W_t z + w_t' z with z = (x, u), terminal 1/2 x' P x + p' x."""

    A: list[Tensor]
    B: list[Tensor]
    c: list[Tensor]
    W: list[Tensor]
    w: list[Tensor]
    P: Tensor
    p: Tensor

    @property
    def problem(self) -> Problem:
        def dynamics(t: int):
            return lambda x, u: self.A[t] @ x + self.B[t] @ u + self.c[t]

        def cost(t: int):
            def l(x: Tensor, u: Tensor) -> Tensor:  # noqa: E743
                z = torch.cat([x, u])
                return 0.5 * z @ self.W[t] @ z + self.w[t] @ z

            return l

        T = len(self.A)
        return Problem(
            [dynamics(t) for t in range(T)],
            [cost(t) for t in range(T)],
            lambda x: 0.5 * x @ self.P @ x + self.p @ x,
        )


def linear_quadratic(sizes: list[int], controls: list[int], seed: int = 0) -> LinearQuadratic:
    """Random, convex; state sizes n_0 .. n_T, control sizes m_0 .. m_{T-1}."""
    g = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    def positive(n: int) -> Tensor:
        root = randn(n, n)
        return root @ root.T / n + 0.1 * torch.eye(n, dtype=torch.float64)

    T = len(controls)
    A = [0.5 * randn(sizes[t + 1], sizes[t]) for t in range(T)]
    B = [randn(sizes[t + 1], controls[t]) for t in range(T)]
    c = [0.1 * randn(sizes[t + 1]) for t in range(T)]
    W = [positive(sizes[t] + controls[t]) for t in range(T)]
    w = [randn(sizes[t] + controls[t]) for t in range(T)]
    return LinearQuadratic(A, B, c, W, w, positive(sizes[-1]), randn(sizes[-1]))


def total_cost(problem: Problem, x0: Tensor, u: list[Tensor]) -> Tensor:
    """J by a plain loop: the oracle for everything that is vectorised."""
    x, J = x0, x0.new_zeros(())
    for t in range(problem.T):
        J = J + problem.l(t)(x, u[t])
        x = problem.f(t)(x, u[t])
    return J + problem.terminal_cost(x)
