"""Every run ends with a status, and never with NaN."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from ddpnopt.control import Problem, Solution, Status, solve
from ddpnopt.control.backward import backward
from ddpnopt.control.derivatives import expand
from ddpnopt.control.inputs import prepare
from ddpnopt.control.rollout import simulate
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


def test_a_step_to_minus_infinity_is_not_an_improvement() -> None:
    """One Newton step on the visible parabola would land in a hole without a bottom."""
    problem = Problem(
        lambda x, u: x + u,
        lambda x, u: 0 * u.sum(),
        lambda x: torch.where(x < 0.4, -torch.inf, x * x).sum(),
        1,
    )
    solution = solve(problem, torch.ones(1, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64))
    assert_finite(solution)
    assert solution.history.step[0] == 0.5
    assert 0.4 <= solution.x[1].item() < 1


def test_regularisation_grows_and_falls_ever_faster_and_falls_to_zero() -> None:
    task = unicycle()
    history = solve(task.problem, task.x0, task.u0, method="ddp", reg_factor=2.0, reg_min=1e-6).history
    mu, step = history.regularization.tolist(), history.step.tolist()
    fails = next(i for i, s in enumerate(step) if s > 0)
    assert fails >= 3
    assert mu[0] == 0
    # 1e-6 to begin with, then times 4, 8, 16, ...
    assert mu[1 : fails + 1] == pytest.approx([1e-6 * 2 ** (i * (i + 1) / 2 - 1) for i in range(1, fails + 1)])
    # successes in a row from the last failure on: divided by 2, 4, 8, ..., and below reg_min it is nothing
    last = max(i for i, s in enumerate(step[:-1]) if s == 0)
    falling = mu[last + 1 :]
    for i, (a, b) in enumerate(pairwise(falling[:-1]), start=1):
        expected = a / 2**i
        assert b == (0 if expected < 1e-6 else pytest.approx(expected))
    assert falling[-2] == 0


@pytest.mark.parametrize("regularize", ["uu", "xx"])
def test_regularisation_shortens_the_step_in_controls_or_in_states(regularize: str) -> None:
    """One stage, x+ = 10 u: (h + mu) k = -g on Q_uu, (h + 100 mu) k = -g on V_xx, by hand."""
    problem = Problem(lambda x, u: 10 * u, lambda x, u: 0.5 * (u * u).sum(), lambda x: x.sum(), 1)
    x0, u0 = torch.zeros(1, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    solution = solve(problem, x0, u0, regularize=regularize, reg_init=3.0, max_iterations=1)
    expected = -10 / (1 + 3) if regularize == "uu" else -10 / (1 + 3 * 100)
    assert solution.u[0].item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("regularize", ["uu", "xx"])
def test_regularisation_damps_both_gains_as_its_name_says(regularize: str) -> None:
    """One stage, x+ = 2 x + 10 u, l = u^2 / 2, phi = x^2 / 2, mu = 3: H k = -Q_u and H K = -H_ux by hand."""
    problem = Problem(lambda x, u: 2 * x + 10 * u, lambda x, u: 0.5 * (u * u).sum(), lambda x: 0.5 * (x * x).sum(), 1)
    start = prepare(problem, torch.ones(1, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64))
    trajectory = simulate(start.runs, start.x0, start.u)
    expansion = expand(problem, start.runs, trajectory, second_order=True)
    mu = torch.tensor([3.0], dtype=torch.float64)
    sweep = backward(expansion, start.runs, mu, regularize=regularize, trajectory=trajectory, limits=None)
    H, H_ux = (101 + 3, 20) if regularize == "uu" else (1 + 100 * 4, 20 * 4)
    assert sweep.k[0].item() == pytest.approx(-20 / H)
    assert sweep.K[0].item() == pytest.approx(-H_ux / H)
    # the promise is that of the undamped model
    assert sweep.linear.item() == pytest.approx(-20 * 20 / H)
    assert sweep.quadratic.item() == pytest.approx(101 * (20 / H) ** 2)
