"""The controller that comes with a solution."""

from __future__ import annotations

import pytest
import torch

from ddpnopt.control import ControlError, solve
from ddpnopt.control.systems import pendulum, unicycle


@pytest.fixture(scope="module")
def parked():
    task = unicycle()
    return task, solve(task.problem, task.x0, task.u0, grad_tol=1e-11)


def test_policy_is_control_plus_gains_times_deviation(parked) -> None:
    _, solution = parked
    x = solution.x[7] + torch.tensor([0.1, -0.2, 0.3], dtype=torch.float64)
    expected = solution.u[7] + solution.k[7] + solution.K[7] @ (x - solution.x[7])
    torch.testing.assert_close(solution.policy(7, x), expected, rtol=0, atol=1e-14)
    without = solution.policy(7, x, step=0.0)
    torch.testing.assert_close(without, expected - solution.k[7], rtol=0, atol=1e-14)


def test_simulating_from_the_same_start_gives_the_solution_back(parked) -> None:
    task, solution = parked
    rollout = solution.simulate(task.x0)
    torch.testing.assert_close(rollout.states, solution.states, rtol=0, atol=1e-9)
    torch.testing.assert_close(rollout.cost, solution.cost, rtol=1e-10, atol=0)


def test_feedback_is_better_than_open_loop_under_disturbance_and_from_another_start(parked) -> None:
    task, solution = parked
    g = torch.Generator().manual_seed(0)
    push = 0.03 * torch.randn(50, 20, 3, generator=g, dtype=torch.float64)
    starts = task.x0 + 0.1 * torch.randn(50, 3, generator=g, dtype=torch.float64)
    closed = solution.simulate(starts, disturbance=push)
    open_loop = solution.simulate(starts, feedback=False, disturbance=push)
    assert closed.cost.shape == (50,)
    assert closed.cost.mean() < 0.97 * open_loop.cost.mean()
    assert (closed.cost < open_loop.cost).double().mean() > 0.9
    torch.testing.assert_close(open_loop.controls, solution.controls.expand(50, -1, -1))


def test_feedback_is_the_slope_of_the_optimal_control_in_the_state(parked) -> None:
    """K_0 is du*/dx: solve the problem again from a start moved a little."""
    task, solution = parked
    for i in range(3):
        dx = torch.zeros(3, dtype=torch.float64)
        dx[i] = 1e-5
        both = solve(
            task.problem, torch.stack([task.x0 + dx, task.x0 - dx]), solution.controls, grad_tol=1e-13, cost_tol=0
        )
        slope = (both.controls[0, 0] - both.controls[1, 0]) / 2e-5
        torch.testing.assert_close(solution.K[0][:, i], slope, rtol=1e-5, atol=1e-5)


def test_disturbance_is_added_to_the_state_after_the_stage(parked) -> None:
    task, solution = parked
    push = torch.zeros(20, 3, dtype=torch.float64)
    push[4] = torch.tensor([0.5, 0.0, 0.0], dtype=torch.float64)
    rollout = solution.simulate(task.x0, feedback=False, disturbance=push)
    torch.testing.assert_close(rollout.x[4], solution.x[4], rtol=0, atol=1e-12)
    torch.testing.assert_close(rollout.x[5], solution.x[5] + push[4], rtol=0, atol=1e-12)


def test_the_solution_of_a_batch_is_a_controller_for_each() -> None:
    task = pendulum(T=25)
    x0 = torch.tensor([[0.5, 0.0], [-0.3, 0.2]], dtype=torch.float64)
    solution = solve(task.problem, x0, task.u0)
    rollout = solution.simulate(x0 + 0.01)
    assert rollout.states.shape == (2, 26, 2)
    assert rollout.controls.shape == (2, 25, 1)
    for b in range(2):
        expected = solution.u[3][b] + solution.k[3][b] + solution.K[3][b] @ (x0[b] - solution.x[3][b])
        torch.testing.assert_close(solution.policy(3, x0)[b], expected)


def test_stacking_stages_of_different_sizes_is_refused() -> None:
    from control_problems import linear_quadratic

    lq = linear_quadratic([3, 2, 4], [2, 1])
    u0 = [torch.zeros(2, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)]
    solution = solve(lq.problem, torch.ones(3, dtype=torch.float64), u0)
    with pytest.raises(ControlError, match=r"state changes its size .*\[3, 2, 4\].*per-stage"):
        _ = solution.states
    with pytest.raises(ControlError, match=r"control changes its size"):
        _ = solution.controls
    assert solution.simulate(torch.zeros(3, dtype=torch.float64)).x[2].shape == (4,)
