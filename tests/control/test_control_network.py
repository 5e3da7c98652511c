"""A network as a control problem: one stage per layer, samples stacked into the state, weights as
controls."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from control_problems import total_cost

from ddpnopt.control import Problem, hamiltonian_gradient, solve
from ddpnopt.control.derivatives import contractions, expand
from ddpnopt.control.inputs import prepare
from ddpnopt.control.rollout import simulate

SAMPLES, WIDTHS = 6, (3, 4, 2)


def network(weight_decay: float = 1e-3):
    """tanh layer, then a linear one; six samples share the weights; mean squared error."""
    g = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, WIDTHS[0], generator=g, dtype=torch.float64)
    targets = torch.randn(SAMPLES, WIDTHS[-1], generator=g, dtype=torch.float64)

    def layer(n: int, out: int, activation):
        def f(x, u):
            W, b = u[: n * out].reshape(out, n), u[n * out :]
            return activation(x.reshape(SAMPLES, n) @ W.T + b).reshape(-1)

        return f

    problem = Problem(
        [layer(3, 4, torch.tanh), layer(4, 2, lambda h: h)],
        lambda x, u: 0.5 * weight_decay * (u * u).sum(),
        lambda x: 0.5 * ((x.reshape(SAMPLES, 2) - targets) ** 2).sum() / SAMPLES,
    )
    sizes = [n * out + out for n, out in pairwise(WIDTHS)]
    u0 = [0.5 * torch.randn(m, generator=g, dtype=torch.float64) for m in sizes]
    return problem, inputs.reshape(-1), u0


def test_gradient_is_that_of_the_loss_over_all_samples() -> None:
    problem, x0, u0 = network()
    weights = [u.clone().requires_grad_() for u in u0]
    expected = torch.autograd.grad(total_cost(problem, x0, weights), weights)
    for mine, autograd in zip(hamiltonian_gradient(problem, x0, u0), expected, strict=True):
        torch.testing.assert_close(mine, autograd, rtol=1e-12, atol=1e-14)


def test_ddp_trains_the_network_to_a_stationary_point() -> None:
    problem, x0, u0 = network()
    solution = solve(problem, x0, u0, method="ddp", grad_tol=1e-9)
    assert solution.status.converged
    assert solution.cost < 0.2 * solution.history.cost[0]
    weights = [u.clone().requires_grad_() for u in solution.u]
    gradient = torch.autograd.grad(total_cost(problem, x0, weights), weights)
    assert max(g.abs().max().item() for g in gradient) < 1e-8
    assert [u.shape for u in solution.u] == [u.shape for u in u0]


def test_tensor_terms_on_the_fly_equal_those_kept(monkeypatch) -> None:
    """V_x . f_zz by either way, and by autograd."""
    problem, x0, u0 = network()
    start = prepare(problem, x0, u0)
    trajectory = simulate(start.runs, start.x0, start.u)
    kept = expand(problem, start.runs, trajectory, second_order=True)
    assert all(tensor is not None for tensor in kept.f_zz)
    monkeypatch.setattr("ddpnopt.control.derivatives.TENSOR_BUDGET", 0)
    fly = expand(problem, start.runs, trajectory, second_order=True)
    assert all(tensor is None for tensor in fly.f_zz)
    g = torch.Generator().manual_seed(2)
    for t, (a, b) in enumerate(zip(contractions(kept, start.runs), contractions(fly, start.runs), strict=True)):
        n_next = start.runs[t].n_next
        V_x = torch.randn(1, n_next, generator=g, dtype=torch.float64)
        torch.testing.assert_close(a(V_x), b(V_x), rtol=1e-12, atol=1e-12)
        n = start.runs[t].n
        expected = torch.autograd.functional.hessian(
            lambda z, n=n, t=t, V_x=V_x: V_x[0] @ problem.f(t)(z[:n], z[n:]), kept.z[t][0, 0]
        )
        torch.testing.assert_close(b(V_x)[0], expected, rtol=1e-10, atol=1e-12)


def test_solution_does_not_depend_on_how_the_tensor_terms_are_formed(monkeypatch) -> None:
    problem, x0, u0 = network()
    a = solve(problem, x0, u0, max_iterations=5)
    monkeypatch.setattr("ddpnopt.control.derivatives.TENSOR_BUDGET", 0)
    b = solve(problem, x0, u0, max_iterations=5)
    assert math.isclose(a.cost.item(), b.cost.item(), rel_tol=1e-9)
    assert a.history.step.tolist() == b.history.step.tolist()


def test_without_cross_terms_the_policy_is_stage_wise_newton() -> None:
    """Proposition 1: with Q_ux = 0 the open gain is -(grad^2_u J)^-1 grad_u J at each stage."""
    rows = torch.tensor([[2.0, 0.3], [0.3, 1.0]], dtype=torch.float64)

    def f(x, u):
        # the two halves of the state never mix with the control in second order
        return x + torch.sin(u)

    problem = Problem(f, lambda x, u: (u @ rows @ u) + u.exp().sum(), lambda x: x.sum(), 3)
    x0 = torch.zeros(2, dtype=torch.float64)
    u0 = torch.tensor([[0.3, -0.2], [0.1, 0.4], [-0.5, 0.2]], dtype=torch.float64)
    solution = solve(problem, x0, u0, max_iterations=0)
    for t in range(3):

        def J(u_t, t=t):
            u = u0.clone().unbind(0)
            return total_cost(problem, x0, [u_t if s == t else u[s] for s in range(3)])

        gradient = torch.func.grad(J)(u0[t])
        newton = -torch.linalg.solve(torch.func.hessian(J)(u0[t]), gradient)
        torch.testing.assert_close(solution.k[t], newton, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(solution.K[t], torch.zeros(2, 2, dtype=torch.float64))
