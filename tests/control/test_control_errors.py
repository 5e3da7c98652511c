"""Bad input: one exception class, a message that says what, at which stage, and what to do."""

from __future__ import annotations

import pytest
import torch

from ddpnopt.control import ControlError, Problem, solve
from ddpnopt.control.systems import unicycle

X0 = torch.tensor([1.0, 0.0], dtype=torch.float64)
U0 = torch.zeros(4, 1, dtype=torch.float64)


def f(x, u):
    return x + 0.1 * torch.stack([x[1], u[0]])


def cost(x, u):
    return (x * x).sum() + (u * u).sum()


def phi(x):
    return (x * x).sum()


def problem(**changes) -> Problem:
    return Problem(**{"dynamics": f, "stage_cost": cost, "terminal_cost": phi, "horizon": 4, **changes})


def test_it_is_a_value_error() -> None:
    assert issubclass(ControlError, ValueError)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dynamics": lambda x, u: x[:1]}, r"dynamics at stage 0 returned 1 components for a state of 2.*return"),
        ({"dynamics": lambda x, u: x.unsqueeze(0)}, r"dynamics at stage 0 must return a vector.*\(1, 2\)"),
        ({"dynamics": lambda x, u: 3.0}, r"dynamics at stage 0 must return a tensor.*float"),
        ({"dynamics": lambda x, u: x.float()}, r"dynamics at stage 0 .*float32; keep the dtype"),
        ({"dynamics": [f, f, lambda x, u: x[:1], f]}, r"dynamics at stage 3 failed on .*\(1,\) and \(1,\)"),
        ({"dynamics": lambda x, u: x if u > 1 else -x}, r"dynamics at stage 0 .* not under torch.func.vmap.*where"),
        ({"stage_cost": [cost, cost, lambda x, u: x, cost]}, r"stage_cost at stage 2 must return a scalar.*sum"),
        ({"stage_cost": lambda x, u: 0.0}, r"stage_cost at stage 0 must return a scalar tensor, not float"),
        ({"terminal_cost": lambda x: x}, r"terminal_cost \(at stage 4\) must return a scalar.*sum"),
        ({"terminal_cost": lambda x: x.sum().float()}, r"terminal_cost.*float32 cost; keep the dtype"),
        ({"dynamics": lambda x, u: x / u}, r"not finite: state x at stage 1 of problem 0"),
        ({"stage_cost": lambda x, u: torch.log(x[1] - 1)}, r"stage cost at stage 0 of problem 0 is nan"),
        ({"terminal_cost": lambda x: 1 / (0 * x[0])}, r"terminal cost at stage 4 of problem 0 is inf"),
        ({"stage_cost": lambda x, u: u.norm() ** 0.5}, r"derivatives of problem 0 are not finite.*start"),
        ({"lower": 0.5}, r"start control 0 \(stage 0, problem 0, component 0\) is outside .*start inside"),
        ({"lower": 1.0, "upper": -1.0}, r"at stage 0 the lower limit \[1.0\] is above the upper"),
        ({"lower": torch.zeros(3)}, r"lower at stage 0 has shape \(3,\), the control there has 1"),
        ({"upper": torch.zeros(3, 1)}, r"upper has 3 rows, the problem has 4 stages"),
        ({"upper": [torch.zeros(1)] * 3}, r"upper has 3 stages, the problem has 4"),
    ],
)
def test_a_problem_that_cannot_be_solved_says_what_is_wrong_and_where(changes: dict, message: str) -> None:
    with pytest.raises(ControlError, match=message):
        solve(problem(**changes), X0, U0)


def test_a_limit_that_excludes_a_later_control_is_named_by_its_stage_and_problem() -> None:
    u0 = torch.zeros(3, 4, 1, dtype=torch.float64)
    u0[2, 1] = 7.0
    with pytest.raises(ControlError, match=r"start control 7 \(stage 1, problem 2, component 0\)"):
        solve(problem(lower=-1.0, upper=1.0), X0, u0)


def test_a_trajectory_that_leaves_the_finite_numbers_later_is_named_by_its_stage_and_problem() -> None:
    starts = torch.tensor([[0.0, 0.0], [1e200, 0.0]], dtype=torch.float64)
    with pytest.raises(ControlError, match="state x at stage 1 of problem 1"):
        solve(problem(dynamics=lambda x, u: x * x * x), starts, U0)


@pytest.mark.parametrize(
    ("x0", "u0", "message"),
    [
        (torch.zeros(1, 2, 3), U0, r"x0 must be a tensor \(n,\) or \(B, n\), not a tensor of shape \(1, 2, 3\)"),
        ([1.0, 0.0], U0, r"x0 must be a tensor .*not list"),
        (torch.zeros(2, dtype=torch.long), U0, r"x0 is torch.int64.*double"),
        (X0.float(), U0, r"start control of stage 0 is torch.float64.*convert"),
        (X0, U0[:3], r"u0 must be a tensor \(T, m\) or \(B, T, m\) with T = 4, not .*\(3, 1\)"),
        (X0, U0[:, 0], r"u0 must be a tensor \(T, m\)"),
        (X0, [U0[0]] * 3, r"u0 has 3 stages, the problem has 4"),
        (X0, [U0[0], U0[0], None, U0[0]], r"u0\[2\] must be a tensor \(m,\) or \(B, m\), not NoneType"),
        (X0, [U0[0], U0[0], U0, U0[0]], r"u0\[2\] is .*\(4, 1\), but u0\[0\] is .*batches differ"),
        (X0.expand(3, 2), U0.expand(2, 4, 1), r"x0 is a batch of 3 problems but u0 one of 2"),
        (X0.expand(0, 2), U0, r"batch is empty"),
    ],
)
def test_wrong_shapes_are_refused(x0, u0, message: str) -> None:
    with pytest.raises(ControlError, match=message):
        solve(problem(), x0, u0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "newton"}, r"unknown method 'newton'; use 'ddp' or 'ilqr'"),
        ({"regularize": "ux"}, r"unknown regularize 'ux'.*'uu'.*'xx'"),
        ({"max_iterations": -1}, r"max_iterations is -1"),
        ({"max_iterations": 2.5}, r"max_iterations is 2.5.*whole number"),
        ({"max_backtracks": -1}, r"max_backtracks is -1"),
        ({"grad_tol": -1e-3}, r"grad_tol is -0.001"),
        ({"cost_tol": float("nan")}, r"cost_tol is nan"),
        ({"reg_init": -1.0}, r"reg_init is -1.0"),
        ({"reg_init": 1e20}, r"reg_init is 1e\+20, above reg_max"),
        ({"reg_min": 0.0}, r"reg_min is 0.0"),
        ({"reg_min": 1.0, "reg_max": 0.5}, r"need 0 < reg_min <= reg_max"),
        ({"reg_factor": 1.0}, r"reg_factor is 1.0; it must be greater than 1"),
        ({"backtrack": 1.0}, r"backtrack is 1.0"),
        ({"sufficient": 0.7}, r"sufficient is 0.7"),
    ],
)
def test_options_out_of_range_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ControlError, match=message):
        solve(problem(), X0, U0, **options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"horizon": 0}, r"horizon is 0"),
        ({"horizon": None}, r"horizon is missing"),
        ({"dynamics": [f] * 3}, r"dynamics says 3, horizon says 4"),
        ({"dynamics": [f] * 3, "stage_cost": [cost] * 5, "horizon": None}, r"dynamics says 3, stage_cost says 5"),
        ({"dynamics": [], "horizon": None}, r"empty sequence"),
        ({"dynamics": [f, 3, f, f]}, r"dynamics\[1\] must be a function, not int"),
        ({"terminal_cost": None}, r"terminal_cost must be a function, not NoneType"),
    ],
)
def test_a_problem_with_an_unclear_number_of_stages_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ControlError, match=message):
        problem(**changes)


def test_the_policy_refuses_stages_and_states_it_does_not_have() -> None:
    task = unicycle()
    solution = solve(task.problem, task.x0, task.u0)
    with pytest.raises(ControlError, match=r"stage 20 does not exist; .* 0 to 19"):
        solution.policy(20, task.x0)
    with pytest.raises(ControlError, match="at stage 3 the state has 3 components, not 2"):
        solution.policy(3, task.x0[:2])
    with pytest.raises(ControlError, match="disturbance has 5 stages, the problem has 20"):
        solution.simulate(task.x0, disturbance=torch.zeros(5, 3, dtype=torch.float64))
