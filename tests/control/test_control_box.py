"""Control limits: projected Newton per stage, and the KKT conditions of the whole problem."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpnopt.control import Problem, Status, hamiltonian_gradient, solve
from ddpnopt.control.boxqp import solve_box
from ddpnopt.control.systems import hanging_starts, pendulum, unicycle


def check_kkt(problem: Problem, x0, u, lower: float, upper: float, tol: float) -> int:
    """Exact limits; gradient zero inside, outward at a limit. Returns how many controls are at one."""
    assert (u >= lower).all()
    assert (u <= upper).all()
    g = torch.stack(hamiltonian_gradient(problem, x0, u), dim=-2)
    at_lower, at_upper = u == lower, u == upper
    free = ~(at_lower | at_upper)
    assert g[free].abs().max() <= tol
    # multipliers: g = lambda_lower - lambda_upper, both non-negative
    assert (g[at_lower] >= -tol).all()
    assert (g[at_upper] <= tol).all()
    return int((~free).sum())


@pytest.mark.parametrize("method", ["ddp", "ilqr"])
def test_kkt_conditions_hold_and_limits_are_exact_for_the_unicycle(method: str) -> None:
    task = unicycle(limit=1.5)
    solution = solve(task.problem, task.x0, task.u0, method=method, grad_tol=1e-8, cost_tol=0.0)
    assert solution.status is Status.GRADIENT
    held = check_kkt(task.problem, task.x0, solution.controls, -1.5, 1.5, 2e-5)
    assert 0 < held < solution.controls.numel()
    free = solve(unicycle().problem, task.x0, task.u0)
    assert solution.cost > free.cost


def test_kkt_conditions_hold_for_a_batch_with_limits() -> None:
    task = pendulum(limit=4.0)
    x0 = hanging_starts(6)
    solution = solve(task.problem, x0, task.u0, grad_tol=1e-8, max_iterations=300)
    assert solution.converged.all()
    assert check_kkt(task.problem, x0, solution.controls, -4.0, 4.0, 1e-5) > 0


def test_the_optimum_with_limits_is_no_worse_than_any_feasible_neighbour() -> None:
    task = unicycle(limit=1.5)
    solution = solve(task.problem, task.x0, task.u0, grad_tol=1e-9)
    g = torch.Generator().manual_seed(0)
    noise = 0.05 * torch.randn(200, *task.u0.shape, generator=g, dtype=torch.float64)
    neighbours = (solution.controls + noise).clamp(-1.5, 1.5)
    starts = solve(task.problem, task.x0, neighbours, max_iterations=0)
    assert (starts.cost >= solution.cost - 1e-9).all()


def test_feedback_is_zero_where_a_limit_holds_the_control_and_the_policy_respects_limits() -> None:
    task = unicycle(limit=1.5)
    solution = solve(task.problem, task.x0, task.u0)
    held = solution.controls.abs() == 1.5
    assert held.any()
    for t in range(20):
        assert (solution.K[t][held[t]] == 0).all()
    far = solution.simulate(task.x0 + 3.0)
    assert (far.controls.abs() <= 1.5).all()
    assert (far.controls.abs() == 1.5).any()


def test_limits_that_never_bind_change_nothing() -> None:
    loose, task = unicycle(limit=1e6), unicycle()
    a = solve(loose.problem, task.x0, task.u0)
    b = solve(task.problem, task.x0, task.u0)
    torch.testing.assert_close(a.controls, b.controls, rtol=0, atol=1e-9)


def test_one_sided_and_per_stage_limits() -> None:
    task = unicycle()
    upper = torch.full((20, 2), torch.inf, dtype=torch.float64)
    upper[3, 0] = -0.25
    problem = Problem(task.problem.dynamics, task.problem.stage_cost, task.problem.terminal_cost, 20, upper=upper)
    u0 = task.u0.clone()
    u0[3, 0] = -0.5
    solution = solve(problem, task.x0, u0)
    assert solution.status.converged
    assert solution.controls[3, 0] == -0.25
    assert solution.controls.max() > 0


def by_enumeration(H, q, lower, upper):
    """Best KKT point over all 3^m active sets."""
    best, argbest = torch.inf, None
    m = q.shape[0]
    for pattern in product((-1, 0, 1), repeat=m):
        fixed = torch.tensor([p != 0 for p in pattern])
        v = torch.where(torch.tensor(pattern) < 0, lower, upper)
        free = ~fixed
        if free.any():
            v = v.clone()
            rhs = -q[free] - H[free][:, fixed] @ v[fixed]
            v[free] = torch.linalg.solve(H[free][:, free], rhs)
        if (v >= lower - 1e-12).all() and (v <= upper + 1e-12).all():
            value = 0.5 * v @ H @ v + q @ v
            if value < best:
                best, argbest = value, v
    return argbest


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), m=st.integers(1, 4))
def test_projected_newton_finds_the_best_active_set(seed: int, m: int) -> None:
    g = torch.Generator().manual_seed(seed)
    B = 5
    root = torch.randn(B, m, m, generator=g, dtype=torch.float64)
    H = root @ root.mT + 0.05 * torch.eye(m, dtype=torch.float64)
    q = 2 * torch.randn(B, m, generator=g, dtype=torch.float64)
    lower = -torch.rand(B, m, generator=g, dtype=torch.float64)
    upper = torch.rand(B, m, generator=g, dtype=torch.float64)
    solution = solve_box(H, q, lower, upper)
    assert solution.ok.all()
    for b in range(B):
        expected = by_enumeration(H[b], q[b], lower[b], upper[b])
        torch.testing.assert_close(solution.v[b], expected, rtol=0, atol=1e-7)


def test_projected_newton_reports_an_indefinite_matrix_and_leaves_the_others_alone() -> None:
    H = torch.stack([torch.eye(2), -torch.eye(2), 2 * torch.eye(2)]).double()
    q = torch.tensor([[0.5, -0.5]] * 3, dtype=torch.float64)
    solution = solve_box(H, q, torch.full_like(q, -1), torch.full_like(q, 1))
    assert solution.ok.tolist() == [True, False, True]
    torch.testing.assert_close(solution.v[0], -q[0])
    torch.testing.assert_close(solution.v[2], -q[2] / 2)
    assert torch.isfinite(solution.v).all()
