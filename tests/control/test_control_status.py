"""Every run ends with a status, and never with NaN."""

from __future__ import annotations

import pytest
import torch

from ddpnopt.control import Problem, Solution, Status, solve
from ddpnopt.control.systems import pendulum, unicycle


def assert_finite(solution: Solution) -> None:
    history = solution.history
    tensors = [*solution.x, *solution.u, *solution.k, *solution.K, solution.cost]
    tensors += [history.cost, history.regularization, history.step]
    assert all(torch.isfinite(tensor).all() for tensor in tensors)
    assert not torch.isnan(solution.gradient_norm).any()
    assert not torch.isnan(history.gradient_norm).any()


def test_no_acceptable_step_ends_with_a_status_and_the_start_trajectory() -> None:
    """The derivative lies: the cost rises along every step the model proposes."""

    class Liar(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(u):
            return u.clone()

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, grad):
            return -grad

        @staticmethod
        def jvp(ctx, tangent):
            return -tangent

    def cost(x, u):
        return Liar.apply(u).sum()

    problem = Problem(lambda x, u: x + u, cost, lambda x: 0 * x.sum(), 3, lower=-1.0, upper=1.0)
    u0 = torch.full((3, 1), 0.25, dtype=torch.float64)
    solution = solve(problem, torch.zeros(1, dtype=torch.float64), u0)
    assert solution.status is Status.NO_STEP
    assert not solution.converged
    torch.testing.assert_close(solution.controls, u0, rtol=0, atol=0)
    assert (solution.history.step == 0).all()
    assert solution.history.regularization[-1] > solution.history.regularization[0]
    assert all((k == 0).all() for k in solution.k)
    assert_finite(solution)


def test_a_concave_cost_that_no_damping_allowed_can_mend_ends_without_a_step() -> None:
    problem = Problem(lambda x, u: x + u, lambda x, u: -1e3 * (u * u).sum(), lambda x: (x * x).sum(), 3)
    u0 = torch.full((3, 1), 0.1, dtype=torch.float64)
    solution = solve(problem, torch.ones(1, dtype=torch.float64), u0, reg_max=10.0)
    assert solution.status is Status.NO_STEP
    assert all((K == 0).all() for K in solution.K)
    assert_finite(solution)


def test_an_unbounded_problem_stops_at_finite_values() -> None:
    problem = Problem(lambda x, u: x + u, lambda x, u: -torch.exp(u.sum()), lambda x: -x.sum(), 2)
    solution = solve(problem, torch.zeros(1, dtype=torch.float64), torch.zeros(2, 1, dtype=torch.float64))
    assert not solution.converged
    assert solution.cost < -2
    assert_finite(solution)


def test_dynamics_that_explode_under_a_full_step_are_handled_by_shorter_ones() -> None:
    def f(x, u):
        return x + 0.1 * u * x**3  # ten controls of the linear model's size: beyond 1e308

    problem = Problem(f, lambda x, u: 1e-3 * (u * u).sum(), lambda x: ((x - 5) ** 2).sum(), 10)
    solution = solve(
        problem, torch.ones(1, dtype=torch.float64), torch.zeros(10, 1, dtype=torch.float64), method="ilqr"
    )
    assert 0 < solution.history.step[0] < 1
    assert solution.converged
    assert solution.cost < 0.1 * solution.history.cost[0]
    assert_finite(solution)


def test_running_out_of_iterations_is_said() -> None:
    task = unicycle()
    solution = solve(task.problem, task.x0, task.u0, max_iterations=3)
    assert solution.status is Status.MAX_ITERATIONS
    assert solution.iterations == 3
    assert_finite(solution)


def test_no_iterations_at_all_returns_the_start_with_its_cost_and_gains() -> None:
    task = unicycle()
    solution = solve(task.problem, task.x0, task.u0, method="ilqr", max_iterations=0)
    assert solution.status is Status.MAX_ITERATIONS
    torch.testing.assert_close(solution.controls, task.u0)
    assert solution.cost.item() == pytest.approx(3150)
    assert any((K != 0).any() for K in solution.K)


def test_starting_at_the_optimum_takes_no_step() -> None:
    task = unicycle()
    optimum = solve(task.problem, task.x0, task.u0, grad_tol=1e-10)
    again = solve(task.problem, task.x0, optimum.controls)
    assert again.status is Status.GRADIENT
    assert again.iterations == 0
    torch.testing.assert_close(again.controls, optimum.controls, rtol=0, atol=0)


def test_relative_reduction_ends_a_run_too() -> None:
    task = pendulum(T=30)
    loose = solve(task.problem, task.x0, task.u0, grad_tol=0.0, cost_tol=1e-3)
    assert loose.status is Status.COST
    tight = solve(task.problem, task.x0, task.u0)
    assert loose.iterations < tight.iterations
    assert loose.cost <= tight.cost * 1.01
