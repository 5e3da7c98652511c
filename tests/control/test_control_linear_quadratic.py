"""On a linear-quadratic problem the second-order model is the problem: one iteration, and Riccati's
answer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from control_problems import LinearQuadratic, linear_quadratic

from ddpnopt.control import solve
from ddpnopt.control.inputs import prepare
from ddpnopt.control.rollout import simulate, stage_costs
from ddpnopt.control.stages import stack


def riccati(lq: LinearQuadratic, x0: np.ndarray) -> tuple[list, list, list, float]:
    """Independent recursion in NumPy on V(x) = 1/2 x' P x + p' x + r: states, controls, gains, cost."""
    A, B, c, W, w = ([m.numpy() for m in group] for group in (lq.A, lq.B, lq.c, lq.W, lq.w))
    P, p, r = lq.P.numpy(), lq.p.numpy(), 0.0
    gains, offsets = [], []
    for t in reversed(range(len(A))):
        n = A[t].shape[1]
        Q, S, R = W[t][:n, :n], W[t][n:, :n], W[t][n:, n:]
        q, s = w[t][:n], w[t][n:]
        r = r + 0.5 * c[t] @ P @ c[t] + p @ c[t]
        p = p + P @ c[t]  # gradient of V_{t+1} at x = c_t
        Huu, Hux, hu = R + B[t].T @ P @ B[t], S + B[t].T @ P @ A[t], s + B[t].T @ p
        K, k = -np.linalg.solve(Huu, Hux), -np.linalg.solve(Huu, hu)
        P_next = P
        P = Q + A[t].T @ P_next @ A[t] + Hux.T @ K
        p, r = q + A[t].T @ p + Hux.T @ k, r + 0.5 * hu @ k
        gains.append(K)
        offsets.append(k)
    x, u = [x0], []
    for t, (K, k) in enumerate(zip(gains[::-1], offsets[::-1], strict=True)):
        u.append(K @ x[-1] + k)
        x.append(A[t] @ x[-1] + B[t] @ u[-1] + c[t])
    return x, u, gains[::-1], float(0.5 * x0 @ P @ x0 + p @ x0 + r)


@pytest.mark.parametrize("method", ["ddp", "ilqr"])
@pytest.mark.parametrize(
    ("sizes", "controls"),
    [([3] * 11, [2] * 10), ([4, 3, 5, 2, 1], [2, 1, 3, 2])],
    ids=["equal sizes", "sizes change from stage to stage"],
)
def test_one_iteration_solves_it_and_agrees_with_riccati(method: str, sizes: list, controls: list) -> None:
    lq = linear_quadratic(sizes, controls)
    x0 = torch.linspace(-1, 1, sizes[0], dtype=torch.float64)
    u0 = [torch.ones(m, dtype=torch.float64) for m in controls]
    solution = solve(lq.problem, x0, u0, method=method)
    assert solution.iterations == 1
    assert solution.history.step.tolist() == [1.0, 0.0]
    states, us, gains, cost = riccati(lq, x0.numpy())
    assert solution.cost.item() == pytest.approx(cost, rel=1e-10, abs=1e-10)
    for t in range(len(controls)):
        np.testing.assert_allclose(solution.u[t], us[t], rtol=0, atol=1e-10)
        np.testing.assert_allclose(solution.K[t], gains[t], rtol=0, atol=1e-10)
        np.testing.assert_allclose(solution.x[t], states[t], rtol=0, atol=1e-10)


def test_the_policy_is_optimal_from_any_other_start() -> None:
    lq = linear_quadratic([3] * 9, [2] * 8, seed=3)
    x0 = torch.ones(3, dtype=torch.float64)
    solution = solve(lq.problem, x0, torch.zeros(8, 2, dtype=torch.float64))
    other = torch.tensor([-2.0, 0.5, 3.0], dtype=torch.float64)
    _, us, _, cost = riccati(lq, other.numpy())
    rollout = solution.simulate(other)
    assert rollout.cost.item() == pytest.approx(cost, rel=1e-10)
    np.testing.assert_allclose(rollout.controls, np.stack(us), rtol=0, atol=1e-10)


def test_one_function_for_all_stages_equals_one_function_per_stage() -> None:
    """The run of equal stages is one vmap call, the list is T of them: same numbers."""
    from ddpnopt.control import Problem

    def f(x, u):
        return x + 0.1 * torch.stack([x[1], torch.sin(x[0]) + u[0]])

    def cost(x, u):
        return (x * x).sum() + 0.1 * (u * u).sum()

    together = Problem(f, cost, lambda x: 10 * (x * x).sum(), 12)
    apart = Problem([lambda x, u, f=f: f(x, u) for _ in range(12)], cost, lambda x: 10 * (x * x).sum())
    x0, u0 = torch.tensor([1.0, 0.0], dtype=torch.float64), torch.zeros(12, 1, dtype=torch.float64)
    a, b = solve(together, x0, u0), solve(apart, x0, u0)
    assert a.iterations == b.iterations
    torch.testing.assert_close(a.controls, b.controls, rtol=0, atol=1e-12)


def test_a_proximal_iteration_minimises_the_cost_plus_the_squared_step() -> None:
    """Over all stages at once: u - u0 = -(J_uu + mu I)^-1 J_u, which damping the gains alone does not give."""
    lq = linear_quadratic([3] * 5, [2] * 4)
    x0, u0 = torch.linspace(-1, 1, 3, dtype=torch.float64), torch.ones(4, 2, dtype=torch.float64)
    runs = prepare(lq.problem, x0, u0).runs

    def J(u: torch.Tensor) -> torch.Tensor:
        trajectory = simulate(runs, x0[None], stack(runs, u.reshape(4, 1, 2).unbind(0)))
        return stage_costs(lq.problem, runs, trajectory).sum()

    flat = u0.reshape(-1)
    H, g = torch.func.hessian(J)(flat), torch.func.grad(J)(flat)
    expected = (flat - torch.linalg.solve(H + 5 * torch.eye(8, dtype=torch.float64), g)).reshape(4, 2)
    found = {
        kind: torch.stack(solve(lq.problem, x0, u0, regularize=kind, reg_init=5.0, max_iterations=1).u)
        for kind in ("proximal", "uu")
    }
    torch.testing.assert_close(found["proximal"], expected, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(found["uu"], expected, atol=1e-3)
