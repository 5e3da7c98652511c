"""Pontryagin: the costate sweep is back-propagation, and the solver's optimum satisfies the principle."""

from __future__ import annotations

import pytest
import torch
from control_problems import linear_quadratic, total_cost

from ddpnopt.control import ControlError, costate, hamiltonian, hamiltonian_gradient, solve
from ddpnopt.control.systems import cartpole, pendulum, unicycle


def backpropagated(problem, x0, u):
    """grad of J with respect to every state and control, by torch.autograd through the whole trajectory."""
    us = [u_t.clone().requires_grad_() for u_t in u]
    xs = [x0.clone().requires_grad_()]
    J = x0.new_zeros(())
    for t in range(problem.T):
        J = J + problem.l(t)(xs[t], us[t])
        xs.append(problem.f(t)(xs[t], us[t]))
        xs[-1].retain_grad()
    (J + problem.terminal_cost(xs[-1])).backward()
    return [x.grad for x in xs], [u.grad for u in us]


@pytest.mark.parametrize("make", [pendulum, unicycle, cartpole])
def test_costate_sweep_is_back_propagation(make) -> None:
    task = make()
    u = 0.5 * torch.randn(task.u0.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    grad_x, grad_u = backpropagated(task.problem, task.x0, u)
    p = costate(task.problem, task.x0, u)
    g = hamiltonian_gradient(task.problem, task.x0, u)
    assert len(p) == task.problem.T + 1
    for mine, autograd in zip((*p, *g), (*grad_x, *grad_u), strict=True):
        torch.testing.assert_close(mine, autograd, rtol=1e-12, atol=1e-12 * float(p[0].abs().max()))


def test_costate_sweep_is_back_propagation_when_sizes_change_and_in_a_batch() -> None:
    problem = linear_quadratic([4, 3, 5, 2], [2, 1, 3]).problem
    g = torch.Generator().manual_seed(5)
    x0 = torch.randn(6, 4, generator=g, dtype=torch.float64)
    u = [torch.randn(6, m, generator=g, dtype=torch.float64) for m in (2, 1, 3)]
    p, h = costate(problem, x0, u), hamiltonian_gradient(problem, x0, u)
    for b in range(6):
        grad_x, grad_u = backpropagated(problem, x0[b], [u_t[b] for u_t in u])
        for mine, autograd in zip((*p, *h), (*grad_x, *grad_u), strict=True):
            torch.testing.assert_close(mine[b], autograd, rtol=1e-12, atol=1e-12)


def test_hamiltonian_is_stage_cost_plus_costate_times_next_state() -> None:
    task = unicycle()
    x, u = task.x0, torch.tensor([0.3, -0.7], dtype=torch.float64)
    p = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    expected = task.problem.l(4)(x, u) + (p * task.problem.f(4)(x, u)).sum()
    assert hamiltonian(task.problem, 4, x, p, u) == expected
    # (19a): the gradient with respect to p is the dynamics
    moved = torch.func.grad(lambda p: hamiltonian(task.problem, 4, x, p, u))(p)
    torch.testing.assert_close(moved, task.problem.f(4)(x, u))


def test_optimum_of_ddp_satisfies_the_principle() -> None:
    task = pendulum()
    solution = solve(task.problem, task.x0, task.u0, grad_tol=1e-11)
    g = hamiltonian_gradient(task.problem, task.x0, solution.controls)
    assert max(g_t.abs().max().item() for g_t in g) < 1e-9
    # and the costate is V_x: the slope of the optimal cost in the start state
    p = costate(task.problem, task.x0, solution.controls)
    step = torch.tensor([1e-5, 0.0], dtype=torch.float64)
    up = solve(task.problem, task.x0 + step, solution.controls, grad_tol=1e-11).cost
    down = solve(task.problem, task.x0 - step, solution.controls, grad_tol=1e-11).cost
    assert ((up - down) / 2e-5).item() == pytest.approx(p[0][0].item(), rel=1e-5)


def test_gradient_norm_of_the_solver_is_that_of_back_propagation() -> None:
    task = cartpole(T=20)
    solution = solve(task.problem, task.x0, task.u0, max_iterations=0)
    _, grad_u = backpropagated(task.problem, task.x0, task.u0)
    expected = torch.stack(grad_u).abs().max()
    torch.testing.assert_close(solution.gradient_norm, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(solution.cost, total_cost(task.problem, task.x0, list(task.u0)))


def test_a_costate_of_the_wrong_stage_is_refused() -> None:
    problem = linear_quadratic([4, 3], [2]).problem
    x, u = torch.zeros(4, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    with pytest.raises(ControlError, match=r"stage 0.*pass p_"):
        hamiltonian(problem, 0, x, x, u)
    with pytest.raises(ControlError, match="stage 1 does not exist"):
        hamiltonian(problem, 1, x, x, u)
