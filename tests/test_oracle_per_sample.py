"""`full` and `outer` against Algorithm 1 written out with dense matrices."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt import EKFAC, KFAC, DDPNOpt
from ddpnopt import _step as step_module

CURVATURES = {
    "identity": ("identity", 0.5),
    "rmsprop": ("rmsprop", 0.02),
    "adam": ("adam", 0.02),
    "kfac": (KFAC(damping=0.1), 0.3),
    "ekfac": (EKFAC(damping=0.1), 0.3),
}
DAMPING = {"damping": 0.1}


@pytest.fixture(autouse=True)
def _float64() -> None:
    torch.set_default_dtype(torch.float64)


def fcn() -> tuple[nn.Sequential, Tensor]:
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3, bias=False), nn.Sigmoid(), nn.Linear(3, 3))
    return net, torch.randn(4, 4)


def sigmoid_output() -> tuple[nn.Sequential, Tensor]:
    return nn.Sequential(nn.Linear(3, 4), nn.Softplus(), nn.Linear(4, 3), nn.Sigmoid()), torch.randn(3, 3)


def tokens() -> tuple[nn.Sequential, Tensor]:
    net = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2), nn.Flatten(), nn.Linear(6, 3))
    return net, torch.randn(3, 3, 3)


def cnn() -> tuple[nn.Sequential, Tensor]:
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, groups=2),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Conv2d(4, 3, 2, stride=1, padding=1, dilation=2, bias=False),
        nn.Sigmoid(),
        nn.Flatten(),
        nn.Linear(3 * 2 * 2, 3),
    )
    return net, torch.randn(3, 2, 4, 4)


NETS = {"fcn": fcn, "sigmoid_output": sigmoid_output, "tokens": tokens, "cnn": cnn}


class Spy:
    """Lets a real step run and keeps its value function and policies."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.V: list[tuple[Tensor, Tensor]] = []
        self.policies: list[Any] = []
        real = step_module.backward_pass

        def backward_pass(stages: Any, value: Any, *rest: Any) -> Any:
            backward = value.backward

            def spying(problem: Any, metric: Any) -> Any:
                policy = backward(problem, metric)
                self.V.insert(0, (getattr(value, "V_x", None), getattr(value, "V_xx", None)))
                self.policies.insert(0, (problem, metric, policy))
                return policy

            value.backward = spying
            return real(stages, value, *rest)

        monkeypatch.setattr(step_module, "backward_pass", backward_pass)


def take_step(net: nn.Sequential, X: Tensor, y: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """One step of DDPNOpt; the outputs before it and the gradient at them."""
    opt = DDPNOpt(net, **options)
    z = net(X)
    z.retain_grad()
    F.cross_entropy(z, y).backward()
    opt.step()
    assert z.grad is not None
    return z.detach(), z.grad


def exact_hessian(z: Tensor) -> Tensor:
    """Of the mean cross-entropy, sample by sample, by autograd."""
    B = len(z)
    return torch.stack(
        [torch.func.hessian(lambda a: F.cross_entropy(a[None], torch.zeros(1).long()))(zi) / B for zi in z]
    )


def same_weights(net: nn.Sequential, result: oracle.Result, tolerance: float = 1e-10) -> None:
    layers = [m for m in net if hasattr(m, "weight")]
    for layer, u in zip(layers, result.u, strict=True):
        torch.testing.assert_close(oracle.flat_u(layer), u, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("vxx_reg", "weight_decay"), [(0.0, 0.0), (0.05, 0.0), (0.0, 0.3)])
@pytest.mark.parametrize(("order", "guard"), [(1, False), (1, True), (2, False), (2, True)])
@pytest.mark.parametrize("kind", CURVATURES)
@pytest.mark.parametrize("name", NETS)
def test_full_equals_algorithm_1_in_gains_values_and_weights(
    name: str, kind: str, order: int, guard: bool, vxx_reg: float, weight_decay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, X = NETS[name]()
    y = torch.arange(len(X)) % 3
    steps = oracle.steps_of(net, X)
    curvature, eta = CURVATURES[kind]
    spy = Spy(monkeypatch)
    z, q = take_step(
        net, X, y, lr=eta, value="full", terminal="cross_entropy", curvature=curvature, order=order, guard=guard,
        vxx_reg=vxx_reg, weight_decay=weight_decay, diagnostics=True,  # keeps the policies for the spy
    )  # fmt: skip
    result = oracle.ddp(
        steps, X, q, exact_hessian(z), eta=eta, kind=kind, order=order, guard=guard, vxx_reg=vxx_reg,
        weight_decay=weight_decay, options=DAMPING,
    )  # fmt: skip
    close = {"rtol": 1e-10, "atol": 1e-10}
    same_weights(net, result)
    for t in range(1, len(steps)):  # V at the inputs of the layers; at the data nobody asks for it
        torch.testing.assert_close(spy.V[t][0], result.V_x[t], **close)
        torch.testing.assert_close(spy.V[t][1], result.V_xx[t], **close)
    for t, (problem, metric, policy) in enumerate(spy.policies):
        flat = lambda parts: torch.cat([p.flatten() for p in parts])  # noqa: E731
        k = -eta * flat(metric.solve(problem.layer, policy(None).parts()))
        torch.testing.assert_close(k, result.k[t].sum(0), **close)
        if t == 0:
            continue
        for i in range(len(X)):  # K of sample i, column by column: what a unit displacement adds
            for j in range(X.new_zeros(problem.x[0].shape).numel()):
                x_hat = problem.x.clone()
                x_hat.view(len(X), -1)[i, j] += 1
                K = -eta * flat(metric.solve(problem.layer, policy(x_hat).parts())) - k
                torch.testing.assert_close(K, result.K[t][i, :, j], **close)


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("closed_loop", [True, False])
@pytest.mark.parametrize("guard", [True, False])
@pytest.mark.parametrize("terminal", ["gn", "callable"])
@pytest.mark.parametrize("kind", CURVATURES)
@pytest.mark.parametrize("name", NETS)
def test_outer_equals_algorithm_1_with_a_rank_one_terminal_hessian(
    name: str, kind: str, terminal: str, guard: bool, closed_loop: bool, weight_decay: float
) -> None:
    net, X = NETS[name]()
    y = torch.arange(len(X)) % 3
    steps = oracle.steps_of(net, X)
    curvature, eta = CURVATURES[kind]
    if not guard:
        eta = eta / (
            1e4 if kind == "rmsprop" else 1e2
        )  # so that s < 1: beyond it the optimizer clips and Algorithm 1 does not
    factor = lambda z: torch.cos(z) + 0.5  # noqa: E731  # any vector that is not the gradient
    z, q = take_step(
        net, X, y, lr=eta, value="outer", terminal=factor if terminal == "callable" else "gn", curvature=curvature,
        guard=guard, closed_loop=closed_loop, weight_decay=weight_decay,
    )  # fmt: skip
    column = q if terminal == "gn" else factor(z) / len(z) ** 0.5
    result = oracle.ddp(
        steps, X, q, column[:, :, None] * column[:, None, :], eta=eta, kind=kind, guard=guard,
        closed_loop=closed_loop, weight_decay=weight_decay, options=DAMPING,
    )  # fmt: skip
    same_weights(net, result)


@pytest.mark.parametrize("terminal", ["mse", "gn", "sqrt", "callable"])
def test_full_takes_each_terminal_curvature(terminal: str) -> None:
    net, X = fcn()
    y = torch.arange(len(X)) % 3
    steps = oracle.steps_of(net, X)
    dense = lambda z: torch.diag_embed(z.square())  # noqa: E731
    z, q = take_step(net, X, y, lr=0.5, value="full", terminal=dense if terminal == "callable" else terminal)
    B, n = z.shape
    outer = q[:, :, None] * q[:, None, :]
    phi = F.cross_entropy(z, y, reduction="none")
    H = {
        "mse": torch.eye(n).expand(B, n, n) * 2 / (B * n),
        "gn": outer,
        "sqrt": outer / (2 * phi / B)[:, None, None],
        "callable": dense(z) / B,
    }[terminal]
    same_weights(net, oracle.ddp(steps, X, q, H, eta=0.5, guard=True))


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("power", [0, 1, 2, 3])
@pytest.mark.parametrize(("order", "guard"), [(1, True), (1, False), (2, True), (2, False)])
@pytest.mark.parametrize("kind", ["identity", "rmsprop", "ekfac"])
def test_the_power_of_the_batch_in_v_xx_is_that_of_the_dense_form(
    kind: str, order: int, guard: bool, power: int, weight_decay: float
) -> None:
    net, X = fcn()
    y = torch.arange(len(X)) % 3
    steps = oracle.steps_of(net, X)
    curvature, eta = CURVATURES[kind]
    z, q = take_step(
        net, X, y, lr=eta, value="full", terminal="cross_entropy", curvature=curvature, order=order, guard=guard,
        vxx_power=power, weight_decay=weight_decay,
    )  # fmt: skip
    B = len(X)
    V_x, V_xx = (B * q, B * exact_hessian(z)) if power == 0 else (q, exact_hessian(z) * B / B**power)
    result = oracle.ddp(
        steps, X, V_x, V_xx, eta=eta, kind=kind, order=order, guard=guard, weight_decay=weight_decay, own=power == 0,
        options=DAMPING,
    )  # fmt: skip
    same_weights(net, result)


@pytest.mark.parametrize("power", [0, 1, 2, 3])
@pytest.mark.parametrize("terminal", ["gn", "sqrt"])
@pytest.mark.parametrize("value", ["outer", "full"])
def test_the_power_of_the_batch_starts_from_that_of_each_terminal_curvature(
    value: str, terminal: str, power: int
) -> None:
    net, X = fcn()
    y = torch.arange(len(X)) % 3
    steps = oracle.steps_of(net, X)
    z, q = take_step(net, X, y, lr=0.5, value=value, terminal=terminal, vxx_power=power)
    B = len(X)
    gradient = B * q
    H = gradient[:, :, None] * gradient[:, None, :]
    if terminal == "sqrt":
        H = H / (2 * F.cross_entropy(z, y, reduction="none"))[:, None, None]
    V_x, V_xx = (gradient, H) if power == 0 else (q, H / B**power)
    same_weights(net, oracle.ddp(steps, X, V_x, V_xx, eta=0.5, guard=True, own=power == 0))


def test_without_guard_s_is_clipped_at_one_and_counted() -> None:
    net, X = fcn()
    opt = DDPNOpt(net, 1e4, value="outer", terminal="gn", guard=False, closed_loop=False, diagnostics=True)
    F.cross_entropy(net(X), torch.arange(len(X)) % 3).backward()
    opt.step()
    assert opt.report.guarded is not None
    assert opt.report.guarded > 0.3
    assert all(p.isfinite().all() for p in net.parameters())
