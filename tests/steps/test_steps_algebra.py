"""The value function of automatic steps against dense matrices, and against samples that are really left out."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt import DDPNOpt
from ddpnopt.ddp.balance import FLOOR, LOW
from ddpnopt.ddp.stage import Displacement, Stage
from ddpnopt.ddp.value.scale_free import DAMPING, LEAST_LOSS, ScaleFree
from ddpnopt.ddp.value.sizes import NEAR_ZERO
from ddpnopt.linear.linear import Linear
from ddpnopt.linear.metric import IDENTITY

SAMPLES = 9


def problem(bias: bool = True, tiny_layer: bool = False, samples: int = SAMPLES) -> tuple[Tensor, list[Stage]]:
    """Losses and stages with random inputs and output gradients: the algebra holds for any."""
    sizes = [(4, 6), (6, 5), (5, 3)]
    stages = []
    for t, (n, m) in enumerate(sizes):
        scale = 1e-5 if tiny_layer and t == 1 else 1.0
        u = [scale * torch.randn(m, n)] + [torch.randn(m)] * bias
        x, p = torch.randn(samples, n) * torch.rand(n) * 3, torch.randn(samples, m) * torch.rand(m)
        stages.append(Stage(str(t), Linear((m, n), bias), x, u, 1.0, [p], [None]))
    return torch.rand(samples) + 0.1, stages


def per_sample_gradients(stage: Stage) -> Tensor:
    """In balanced variables, one row per sample, with roots written out."""
    x, p, bias = stage.x, stage.p_h[0], len(stage.u) > 1
    scale = x.square().mean().sqrt()
    x, p = x @ inverse_root(x.T @ x, FLOOR) / scale, p @ inverse_root(p.T @ p, LOW) * scale
    grads = torch.einsum("bo,bj->boj", p, x).flatten(1)
    return torch.cat([grads, p], 1) if bias else grads


def inverse_root(C: Tensor, floor: float) -> Tensor:
    """The inverse fourth root of a matrix with mean diagonal 1."""
    values, Q = torch.linalg.eigh(C / C.diagonal().mean() + floor * torch.eye(len(C)))
    return Q @ torch.diag(values**-0.25) @ Q.T


class Dense:
    """The model of a batch, written out."""

    def __init__(self, losses: Tensor, stages: list[Stage]) -> None:
        phi = losses.clamp_min(LEAST_LOSS * losses.mean())
        lam, self.r = 0.5 / phi, (2 * phi).sqrt()
        self.root = lam.sqrt()
        self.A_of: list[Tensor] = []
        self.ratio: list[Tensor] = []
        self.etas: list[Tensor] = []
        for stage in stages:
            P = per_sample_gradients(stage)
            K = P @ P.T
            k = (lam * K.diagonal()).mean()
            size = float(stage.u[0].square().mean().sqrt())
            usual = (3 * stage.u[0].shape[1]) ** -0.5
            size = size if size > NEAR_ZERO * usual else usual
            eta = size / (k / P.shape[1]).sqrt()
            self.A_of.append(eta * self.root[:, None] * K * self.root)
            self.ratio.append(eta * k)
            self.etas.append(eta)
        self.A = torch.stack(self.A_of).sum(0)
        self.damped = self.A + DAMPING * self.A.diagonal().mean() * torch.eye(len(losses))
        self.y = torch.linalg.solve(self.damped, self.r)

    def without(self, i: int) -> Tensor:
        """What a step made from all other samples would do to sample i."""
        others = [j for j in range(len(self.r)) if j != i]
        y = torch.linalg.solve(self.damped[others][:, others], self.r[others])
        return self.A[i, others] @ y


CASES = [(True, False), (False, False), (True, True)]


@pytest.mark.parametrize(("bias", "tiny_layer"), CASES, ids=["bias", "no bias", "a layer next to zero"])
def test_evidence_equals_dense_matrices_and_samples_really_left_out(bias: bool, tiny_layer: bool) -> None:
    losses, stages = problem(bias, tiny_layer)
    losses[2] = 1e-9  # below LEAST_LOSS
    dense = Dense(losses, stages)
    value = ScaleFree(losses, Displacement(True))
    for stage in reversed(stages):
        value.backward(stage, IDENTITY)
    found = value.evidence()

    r, achieved = dense.r, dense.A @ dense.y
    left_out = torch.stack([dense.without(i) for i in range(SAMPLES)])
    loss = 0.5 * float(r @ r)
    assert found.loss == pytest.approx(float(losses.clamp_min(LEAST_LOSS * losses.mean()).sum()), rel=1e-9)
    assert found.own == pytest.approx(float(r @ achieved) / loss, rel=1e-9)
    assert found.own_curvature == pytest.approx(float(achieved @ achieved) / loss, rel=1e-9)
    assert found.unseen == pytest.approx(float(r @ left_out) / loss, rel=1e-8)
    assert found.unseen_curvature == pytest.approx(float(left_out @ left_out) / loss, rel=1e-8)
    for stage, eta in zip(stages, dense.etas, strict=True):
        assert stage.eta == pytest.approx(float(eta), rel=1e-9)


@pytest.mark.parametrize("samples", [9, 70], ids=["solved together", "solved one by one"])
def test_each_stage_solves_its_own_dense_system_for_the_fraction_and_the_displacement(samples: int) -> None:
    losses, stages = problem(samples=samples)
    dense = Dense(losses, stages)
    value = ScaleFree(losses, Displacement(True))
    solvers = [value.couple(stage, IDENTITY)[1] for stage in reversed(stages)][::-1]
    value.evidence()
    value.ask(0.3)
    damping = dense.damped - dense.A
    for t, solve in enumerate(solvers):
        A = torch.stack(dense.A_of[t:]).sum(0)
        for c in (None, 0.003 * torch.randn(samples)):  # so small that no reaction is bounded
            target = 0.3 * dense.r + (0 if c is None else dense.root * c)
            expected = dense.root * torch.linalg.solve(A + damping, target)
            torch.testing.assert_close(solve(c), expected, rtol=1e-8, atol=1e-10)
    change = -0.3 * (dense.A @ dense.y)
    predicted = float((change / dense.root).sum() + 0.5 * change @ change)
    assert value.predicted() == pytest.approx(predicted, rel=1e-9)


def test_a_linear_network_moves_exactly_as_predicted() -> None:
    model = nn.Linear(4, 3)
    x, y = torch.randn(8, 4), torch.arange(8) % 3
    opt = DDPNOpt(model)
    for _ in range(3):
        before = model(x).detach().requires_grad_()
        old = F.cross_entropy(before, y)
        q = torch.autograd.grad(old, before)[0]
        loss = old.item()
        F.cross_entropy(model(x), y).backward()
        opt.step()
        decrease = -(q * (model(x) - before)).sum().item() / loss
        assert decrease == pytest.approx(opt._length.decrease, rel=1e-9)


def test_a_deep_linear_network_moves_as_predicted_up_to_terms_of_second_order() -> None:
    """The error of the prediction falls with the square of the step's length."""
    errors = []
    for factor in (1e-2, 1e-3):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
        x, y = torch.randn(8, 4), torch.arange(8) % 3
        before = model(x).detach().requires_grad_()
        loss = F.cross_entropy(before, y)
        q = torch.autograd.grad(loss, before)[0]
        opt = DDPNOpt(model)
        opt.param_groups[0]["lr"] = factor
        F.cross_entropy(model(x), y).backward()
        opt.step()
        decrease = -(q * (model(x) - before)).sum().item() / loss.item()
        errors.append(abs(decrease - opt._length.decrease))
        assert errors[-1] < 0.05 * opt._length.decrease
    assert errors[1] < 0.02 * errors[0]
