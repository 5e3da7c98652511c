"""The solver finds known optima, and as fast as the theory says."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from ddpnopt.control import Status, solve
from ddpnopt.control.systems import cartpole, pendulum, unicycle

UNICYCLE = 249.560897930822


@pytest.mark.parametrize("regularize", ["uu", "xx", "proximal"])
@pytest.mark.parametrize("method", ["ilqr", "ddp"])
def test_unicycle_is_parked_at_the_known_optimum(method: str, regularize: str) -> None:
    task = unicycle()
    solution = solve(task.problem, task.x0, task.u0, method=method, regularize=regularize)
    assert solution.status.converged
    assert solution.cost.item() == pytest.approx(UNICYCLE, rel=1e-9)


def test_last_iterations_of_ddp_converge_quadratically() -> None:
    """From u = 0, regularisation falling to zero on its own: each gradient is about the last one squared."""
    task = unicycle()
    history = solve(task.problem, task.x0, task.u0, method="ddp", grad_tol=1e-13, cost_tol=0).history
    g = history.gradient_norm.tolist()
    assert g[-1] < 1e-11
    assert history.step[-4:-1].eq(1).all()
    last = [(a, b) for a, b in pairwise(g) if a < 0.5 and b > 1e-12]
    assert len(last) >= 2
    assert all(b <= 2 * a * a for a, b in last)


def test_ddp_is_quadratic_where_ilqr_is_linear_near_the_optimum() -> None:
    task = unicycle()
    optimum = solve(task.problem, task.x0, task.u0, grad_tol=1e-12).controls
    noise = torch.randn(20, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    norms = {
        method: solve(
            task.problem, task.x0, optimum + 0.1 * noise, method=method, grad_tol=1e-10, cost_tol=0
        ).history.gradient_norm.tolist()
        for method in ("ddp", "ilqr")
    }
    ddp = [(a, b) for a, b in pairwise(norms["ddp"]) if a < 1]
    assert len(ddp) >= 2
    assert all(b <= max(a * a, 1e-12) for a, b in ddp)
    # iLQR without the tensor terms gains a roughly constant factor per iteration
    ilqr = [(a, b) for a, b in pairwise(norms["ilqr"]) if a < 1e-2]
    assert len(ilqr) >= 5
    assert all(b > 0.02 * a for a, b in ilqr)


@pytest.mark.parametrize("task", [pendulum(), cartpole(T=40, dt=0.06)], ids=["pendulum", "cartpole"])
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
