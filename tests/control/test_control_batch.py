"""A batch is solved as if each problem were alone."""

from __future__ import annotations

import pytest
import torch

from ddpnopt.control import Status, solve
from ddpnopt.control.systems import hanging_starts, pendulum, unicycle


@pytest.mark.parametrize("limit", [None, 3.0])
@pytest.mark.parametrize("method", ["ddp", "ilqr"])
def test_batched_solution_equals_solving_each_problem_on_its_own(method: str, limit: float | None) -> None:
    task = unicycle(limit=limit)
    g = torch.Generator().manual_seed(1)
    x0 = task.x0 + 0.5 * torch.randn(4, 3, generator=g, dtype=torch.float64)
    u0 = (0.3 * torch.randn(4, 20, 2, generator=g, dtype=torch.float64)).clamp(-1, 1)
    # far above rounding, which would otherwise decide when a linearly converging problem ends
    options = {"method": method, "cost_tol": 1e-6, "grad_tol": 0.0}
    batch = solve(task.problem, x0, u0, **options)
    # they must differ in what they need, or the masks are not tested
    assert len(set(batch.iterations.tolist())) > 1
    for b in range(4):
        alone = solve(task.problem, x0[b], u0[b], **options)
        assert alone.status == batch.status[b]
        assert alone.iterations == batch.iterations[b]
        torch.testing.assert_close(batch.controls[b], alone.controls, rtol=0, atol=1e-9)
        torch.testing.assert_close(batch.states[b], alone.states, rtol=0, atol=1e-9)
        torch.testing.assert_close(batch.cost[b], alone.cost, rtol=1e-9, atol=0)
        for t in range(20):
            torch.testing.assert_close(batch.K[t][b], alone.K[t], rtol=0, atol=1e-9)
        rows = int(alone.iterations)
        for name in ("regularization", "step"):
            mine = getattr(batch.history, name)[:rows, b]
            torch.testing.assert_close(mine, getattr(alone.history, name)[:rows], rtol=1e-9, atol=1e-12)


def test_pendulum_batch_equals_each_alone() -> None:
    task = pendulum(T=40)
    x0 = hanging_starts(3, seed=4)
    batch = solve(task.problem, x0, task.u0, grad_tol=1e-10)
    for b in range(3):
        alone = solve(task.problem, x0[b], task.u0, grad_tol=1e-10)
        torch.testing.assert_close(batch.controls[b], alone.controls, rtol=0, atol=1e-9)


def test_one_bad_problem_does_not_harm_the_others() -> None:
    """Problem 1 starts where the cost's derivative blows up under any step; 0 and 2 are ordinary."""
    from ddpnopt.control import Problem

    def f(x, u):
        return x + u

    def cost(x, u):
        # concave in u beyond any regularisation allowed below, if the first state is large
        return (x * x).sum() + (u * u).sum() * torch.where(x[0] > 5, -1e6, 1.0)

    problem = Problem(f, cost, lambda x: (x * x).sum(), 5)
    x0 = torch.tensor([[1.0], [10.0], [-2.0]], dtype=torch.float64)
    u0 = torch.full((5, 1), 0.1, dtype=torch.float64)
    batch = solve(problem, x0, u0, reg_max=1e3)
    assert batch.status[1] is Status.NO_STEP
    assert batch.converged.tolist() == [True, False, True]
    for b in (0, 2):
        alone = solve(problem, x0[b], u0, reg_max=1e3)
        torch.testing.assert_close(batch.controls[b], alone.controls, rtol=0, atol=1e-12)
    assert all(torch.isfinite(tensor).all() for tensor in (*batch.x, *batch.u, *batch.k, *batch.K))


def test_one_start_with_many_control_sequences_is_a_batch() -> None:
    task = unicycle()
    u0 = torch.stack([task.u0, task.u0 + 0.5])
    batch = solve(task.problem, task.x0, u0)
    assert batch.controls.shape == (2, 20, 2)
    torch.testing.assert_close(batch.cost[0], solve(task.problem, task.x0, task.u0).cost, rtol=1e-9, atol=0)


def test_the_stage_functions_are_called_as_often_for_a_batch_as_for_one() -> None:
    """No Python loop over problems: calls are per iteration and stage, never per problem."""
    from ddpnopt.control import Problem

    base = unicycle()
    calls = [0]

    def f(x, u):
        calls[0] += 1
        return base.problem.f(0)(x, u)

    problem = Problem(f, base.problem.stage_cost, base.problem.terminal_cost, 20)
    options = {"method": "ilqr", "max_iterations": 3, "grad_tol": 0.0}
    solve(problem, base.x0, base.u0, **options)
    one, calls[0] = calls[0], 0
    solve(problem, base.x0.expand(50, -1), base.u0, **options)
    assert calls[0] == one
