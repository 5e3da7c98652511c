"""The solver finds known optima, and as fast as the theory says."""

from __future__ import annotations

import math

import pytest
import torch

from ddpnopt.control import Status, solve
from ddpnopt.control.systems import cartpole, pendulum, unicycle

UNICYCLE = 249.560897930822


@pytest.mark.parametrize("regularize", ["uu", "xx"])
@pytest.mark.parametrize("method", ["ilqr", "ddp"])
def test_unicycle_is_parked_at_the_known_optimum(method: str, regularize: str) -> None:
    task = unicycle()
    solution = solve(task.problem, task.x0, task.u0, method=method, regularize=regularize)
    assert solution.status.converged
    assert solution.cost.item() == pytest.approx(UNICYCLE, rel=1e-9)


def orders(norms: torch.Tensor, above: float, below: float) -> list[float]:
    """log |g_{i+1}| / |g_i|  over  log |g_i| / |g_{i-1}| for the norms between rounding and the first
    basin."""
    g = [v for v in norms.tolist() if above < v < below]
    return [math.log(g[i + 1] / g[i]) / math.log(g[i] / g[i - 1]) for i in range(1, len(g) - 1)]


def test_last_iterations_of_ddp_converge_quadratically() -> None:
    task = unicycle()
    history = solve(task.problem, task.x0, task.u0, method="ddp", grad_tol=1e-11).history
    g = history.gradient_norm
    assert g[-1] < 1e-10
    assert history.step[-4:-1].eq(1).all()
    assert history.regularization[-4:-1].eq(0).all()
    # |g+| <= C |g|^2 with one modest C over the last steps that stand above rounding
    last = [(a, b) for a, b in zip(g[:-1].tolist(), g[1:].tolist(), strict=True) if a < 1.0 and b > 1e-10]
    assert len(last) >= 1
    assert all(b <= 10 * a * a for a, b in last)
    assert g[-2] > 100 * g[-1]


def test_ddp_is_quadratic_where_ilqr_is_linear_near_the_optimum() -> None:
    """Half-way up a pendulum with torque the tensor terms matter: V_x . f_xx does not vanish at the
    optimum."""
    task = pendulum(T=30)
    near = solve(task.problem, task.x0, task.u0, grad_tol=1e-10).controls + 0.02
    ddp = solve(task.problem, task.x0, near, method="ddp", grad_tol=1e-12, cost_tol=0).history.gradient_norm
    ilqr = solve(task.problem, task.x0, near, method="ilqr", grad_tol=1e-9, cost_tol=0).history.gradient_norm
    assert max(orders(ddp, 1e-12, 1e-1)) > 1.6
    tail = orders(ilqr, 1e-9, 1e-3)
    assert len(tail) >= 3
    assert max(tail) < 1.3


@pytest.mark.parametrize("task", [pendulum(), cartpole()], ids=["pendulum", "cartpole"])
def test_swing_up_ends_upright_and_at_rest(task) -> None:
    solution = solve(task.problem, task.x0, task.u0, method="ddp", max_iterations=400)
    assert solution.status.converged
    end = solution.states[-1]
    angle = end[task.states.index("angle")].item()
    assert math.cos(angle) == pytest.approx(-1, abs=1e-3)
    assert abs(end[task.states.index("rate")].item()) < 0.05


def test_ddp_and_ilqr_agree_on_the_minimum_and_on_the_gradient() -> None:
    task = unicycle()
    ddp = solve(task.problem, task.x0, task.u0, method="ddp", grad_tol=1e-12)
    ilqr = solve(task.problem, task.x0, task.u0, method="ilqr", grad_tol=1e-12)
    torch.testing.assert_close(ddp.controls, ilqr.controls, rtol=0, atol=1e-6)


def test_history_is_monotone_and_begins_and_ends_at_the_right_costs() -> None:
    task = unicycle()
    solution = solve(task.problem, task.x0, task.u0)
    cost = solution.history.cost
    assert cost.shape == (int(solution.iterations) + 1,)
    # from (-1, -1, 1) at rest: |x|^2 = 3 all the way
    assert cost[0].item() == pytest.approx(20 * 150 + 150)
    assert (cost[1:] <= cost[:-1] + 1e-12 * cost[:-1]).all()
    assert cost[-1] == solution.cost
    moved = solution.history.step[:-1] > 0
    assert (cost[1:][~moved] == cost[:-1][~moved]).all()


def test_float32_converges_to_its_own_precision() -> None:
    task = unicycle()
    solution = solve(task.problem, task.x0.float(), task.u0.float())
    assert solution.controls.dtype == torch.float32
    assert solution.status in (Status.GRADIENT, Status.COST)
    assert solution.cost.item() == pytest.approx(UNICYCLE, rel=1e-5)
