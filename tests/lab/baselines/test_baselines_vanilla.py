"""Vanilla DDP on a network is Algorithm 1 on the stacked batch."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from baseline_networks import backward, fcn, vectors, weights
from torch import Tensor, nn

from ddpnopt.control import Problem, solve
from ddpnopt.lab.baselines import MMCLoss, VanillaDDP


def stacked(model: nn.Sequential, x: Tensor, loss, weight_decay: float = 0.0) -> tuple[Problem, Tensor, list[Tensor]]:
    """The control problem written by hand for `fcn`: states of B n numbers, x_0 the data."""
    B = len(x)

    def layer(linear: nn.Linear, activation):
        out, n = linear.weight.shape

        def f(x: Tensor, u: Tensor) -> Tensor:
            W, b = u[: n * out].reshape(out, n), u[n * out :]
            return activation(x.reshape(B, n) @ W.T + b).reshape(-1)

        return f

    linears = [m for m in model if isinstance(m, nn.Linear)]
    dynamics = [layer(l, a) for l, a in zip(linears, (torch.tanh, torch.sigmoid, lambda h: h), strict=True)]
    problem = Problem(
        dynamics,
        lambda x, u: 0.5 * weight_decay * (u * u).sum(),
        lambda z: loss(z.reshape(B, linears[-1].out_features)),
    )
    return problem, x.reshape(-1), [torch.cat([l.weight.detach().reshape(-1), l.bias.detach()]) for l in linears]


def flat(model: nn.Sequential) -> list[Tensor]:
    return [torch.cat([m.weight.detach().reshape(-1), m.bias.detach()]) for m in model if isinstance(m, nn.Linear)]


@pytest.mark.parametrize(("damping", "weight_decay"), [(1.0, 0.0), (1.0, 0.1), (5.0, 0.0)])
def test_a_step_is_an_iteration_of_the_control_solver(damping: float, weight_decay: float) -> None:
    model = fcn()
    x, y = vectors(6)
    problem, x0, u0 = stacked(model, x, lambda z: F.cross_entropy(z, y), weight_decay)
    opt = VanillaDDP(model, damping=damping, weight_decay=weight_decay)
    backward(model, opt, x, y)
    opt.step()
    assert opt.report.tries == 1
    expected = solve(problem, x0, u0, max_iterations=1, reg_init=damping, regularize="proximal").u
    for mine, control in zip(flat(model), expected, strict=True):
        torch.testing.assert_close(mine, control, rtol=1e-9, atol=1e-10)


def test_where_q_uu_is_not_positive_it_raises_the_damping_as_the_solver_does() -> None:
    model = fcn()
    x, y = vectors(6)
    problem, x0, u0 = stacked(model, x, lambda z: F.cross_entropy(z, y))
    opt = VanillaDDP(model, damping=1e-4)
    backward(model, opt, x, y)
    opt.step()
    assert opt.report.tries > 1
    expected = solve(problem, x0, u0, max_iterations=opt.report.tries, reg_init=1e-4, regularize="proximal")
    assert float(expected.history.regularization[-2]) == pytest.approx(opt.report.damping)
    for mine, control in zip(flat(model), expected.u, strict=True):
        torch.testing.assert_close(mine, control, rtol=1e-9, atol=1e-10)


def test_on_one_layer_it_is_a_damped_newton_step() -> None:
    """One stage and no earlier state: k = -(Q_uu + mu I)^-1 Q_u with Q_uu the Hessian of the loss."""
    model = nn.Sequential(nn.Linear(3, 2))
    x, y = torch.randn(5, 3), torch.randint(2, (5,))
    u = flat(model)[0]

    def loss(u: Tensor) -> Tensor:
        return F.cross_entropy(x @ u[:6].reshape(2, 3).T + u[6:], y)

    H = torch.autograd.functional.hessian(loss, u)
    expected = u - torch.linalg.solve(H + 0.5 * torch.eye(8), torch.func.grad(loss)(u))
    opt = VanillaDDP(model, damping=0.5)
    backward(model, opt, x, y)
    opt.step()
    torch.testing.assert_close(flat(model)[0], expected)


def test_it_knows_the_mmc_loss_when_told() -> None:
    model = fcn()
    x, y = vectors(6)
    loss = MMCLoss(3)
    problem, x0, u0 = stacked(model, x, lambda z: loss(z, y))
    opt = VanillaDDP(model, damping=50.0, loss="half_squared_error")
    opt.zero_grad()
    loss(model(x), y).backward()
    opt.step()
    expected = solve(problem, x0, u0, max_iterations=opt.report.tries, reg_init=50.0, regularize="proximal").u
    for mine, control in zip(flat(model), expected, strict=True):
        torch.testing.assert_close(mine, control, rtol=1e-8, atol=1e-9)


def test_it_trains_and_every_step_lowers_the_loss_of_its_batch() -> None:
    model = fcn()
    x, y = vectors()
    opt = VanillaDDP(model, damping=0.1)
    losses = []
    for _ in range(10):
        losses.append(float(backward(model, opt, x, y)))
        opt.step()
    assert all(b < a for a, b in pairwise(losses))
    assert losses[-1] < 0.5 * losses[0]
    assert opt.report.rejected == 0


def test_damping_goes_on_where_it_was_after_loading_the_state() -> None:
    model = fcn()
    x, y = vectors()
    opt = VanillaDDP(model, damping=1e-3)
    backward(model, opt, x, y)
    opt.step()
    other = copy.deepcopy(model)
    again = VanillaDDP(other, damping=1e-3)
    again.load_state_dict(opt.state_dict())
    for m, o in ((model, opt), (other, again)):
        backward(m, o, x, y)
        o.step()
    assert opt.report.damping == again.report.damping
    assert all(torch.equal(a, b) for a, b in zip(weights(model), weights(other), strict=True))


def test_float32_weights_stay_so() -> None:
    model = fcn().float()
    opt = VanillaDDP(model)
    x, y = vectors()
    before = float(backward(model, opt, x.float(), y))
    opt.step()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert float(backward(model, opt, x.float(), y)) < before
