"""`batch` against joint-state DDP written out with dense matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
import torch.nn.functional as F
from test_oracle_per_sample import CURVATURES, DAMPING, NETS, same_weights, take_step
from torch import Tensor, nn

close = {"rtol": 1e-9, "atol": 1e-9}


@pytest.fixture(autouse=True)
def _float64() -> None:
    torch.set_default_dtype(torch.float64)


def terminal_hessian(terminal: str, z: Tensor, q: Tensor, y: Tensor) -> Tensor:
    B = len(z)
    if terminal == "gn":
        return torch.block_diag(*[B * torch.outer(a, a) for a in q])
    if terminal == "sqrt":
        phi = F.cross_entropy(z, y, reduction="none") / B
        return torch.block_diag(*[torch.outer(a, a) / (2 * f) for a, f in zip(q, phi, strict=True)])
    s = torch.softmax(z, 1)
    return torch.block_diag(*[(torch.diag(a) - torch.outer(a, a)) / B for a in s])


@pytest.mark.parametrize(("weight_decay", "recompute"), [(0.0, False), (0.3, False), (0.3, True)])
@pytest.mark.parametrize("closed_loop", [True, False])
@pytest.mark.parametrize("terminal", ["sqrt", "gn", "cross_entropy"])
@pytest.mark.parametrize("kind", CURVATURES)
@pytest.mark.parametrize("name", NETS)
def test_batch_equals_joint_state_ddp_in_value_and_weights(
    name: str, kind: str, terminal: str, closed_loop: bool, weight_decay: float, recompute: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    net, X = NETS[name]()
    y = torch.arange(len(X)) % 3
    steps = oracle.steps_of(net, X)
    curvature, eta = CURVATURES[kind]
    if kind == "rmsprop":
        eta = eta / 10  # its first step is ten times the later ones: the loss would rise and the step be shortened
    spy = BatchSpy(monkeypatch)
    z, q = take_step(
        net, X, y, lr=eta, value="batch", dof=1.0, terminal=terminal, curvature=curvature, closed_loop=closed_loop,
        weight_decay=weight_decay, recompute=recompute,
    )  # fmt: skip
    result = oracle.joint_ddp(
        steps, X, q.flatten(), terminal_hessian(terminal, z, q, y), eta=eta, kind=kind, closed_loop=closed_loop,
        weight_decay=weight_decay, options=DAMPING,
    )  # fmt: skip
    same_weights(net, result, 1e-9)
    for t in range(1, 1 if recompute else len(steps)):  # V_x = P v and V_xx = P L P' at the input of layer t
        P = torch.cat([torch.block_diag(*p.flatten(1)) for p in spy.p_x[t]])  # (R B, B n)
        torch.testing.assert_close(spy.v[t] @ P, result.V_x[t], **close)
        torch.testing.assert_close(P.T @ spy.L[t] @ P, result.V_xx[t], **close)


EVERY_KIND: dict[str, tuple[Callable[[], nn.Sequential], Callable[[], Tensor]]] = {
    "layer norms": (
        lambda: nn.Sequential(
            nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3), nn.LayerNorm(3, bias=False), nn.Tanh(),
            nn.Linear(3, 3),
        ),
        lambda: torch.randn(4, 4),
    ),
    "norms of tokens": (
        lambda: nn.Sequential(
            nn.Linear(3, 4), nn.RMSNorm(4), nn.Tanh(), nn.Linear(4, 2), nn.LayerNorm((3, 2)), nn.Flatten(),
            nn.Linear(6, 3),
        ),
        lambda: torch.randn(3, 3, 3),
    ),
    "group norm": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 2), nn.GroupNorm(2, 4), nn.Sigmoid(), nn.Conv2d(4, 2, 2), nn.Flatten(), nn.Linear(8, 3)
        ),
        lambda: torch.randn(3, 1, 4, 4),
    ),
    "embedding": (
        lambda: nn.Sequential(
            nn.Embedding(5, 3, padding_idx=1), nn.LayerNorm(3), nn.Tanh(), nn.Linear(3, 2), nn.Tanh(), nn.Flatten(),
            nn.Linear(8, 3),
        ),
        lambda: torch.randint(5, (4, 4)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("terminal", ["sqrt", "gn", "cross_entropy"])
@pytest.mark.parametrize("kind", ["identity", "rmsprop", "adam"])
@pytest.mark.parametrize("name", EVERY_KIND)
def test_norms_and_embeddings_equal_joint_state_ddp(name: str, kind: str, terminal: str, weight_decay: float) -> None:
    make, inputs = EVERY_KIND[name]
    net, X = make(), inputs()
    for p in net.parameters():
        p.data += 0.1 * torch.randn_like(p)
    if isinstance(net[0], nn.Embedding):
        net[0].weight.data[1] = 0.0  # the row of the padding
    y = torch.arange(len(X)) % 3
    steps = oracle.steps_of(oracle.with_norms_apart(net), X)
    curvature, eta = CURVATURES[kind]
    eta = eta if kind == "identity" else eta / 20
    z, q = take_step(
        net, X, y, lr=eta, value="batch", dof=1.0, terminal=terminal, curvature=curvature, weight_decay=weight_decay
    )
    result = oracle.joint_ddp(
        steps, X.to(z.dtype), q.flatten(), terminal_hessian(terminal, z, q, y), eta=eta, kind=kind,
        weight_decay=weight_decay, options=DAMPING,
    )  # fmt: skip
    same_weights(net, result, 1e-9)


class BatchSpy:
    """Keeps v_t and L_t = (I + L S_t)^-1 L of a real step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from ddpnopt.ddp.value import Batch

        self.v: list[Tensor] = []
        self.L: list[Tensor] = []
        self.p_x: list[list[Any]] = []
        real = Batch.backward

        def backward(value: Any, problem: Any, metric: Any) -> Any:
            policy = real(value, problem, metric)
            eye = torch.eye(len(value.L))
            self.v.insert(0, value.v)
            self.L.insert(0, torch.linalg.solve(eye + value.L[:, None] * value.S, torch.diag(value.L)))
            self.p_x.insert(0, problem.p_x)  # which the forward sweep lets go
            return policy

        monkeypatch.setattr(Batch, "backward", backward)


class Residual(nn.Module):
    """x -> tanh(a x) -> tanh(b .) + skip -> c ."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        skip = torch.tanh(self.a(x))
        return self.c(torch.tanh(self.b(skip)) + skip)


def residual_steps(net: Residual) -> list[oracle.Step]:
    """The extended state: what is carried past a layer is part of it."""
    shape = torch.Size([4])
    a = oracle.step_of(net.a, [nn.Tanh()], torch.Size([3]), shape)
    b = oracle.step_of(net.b, [nn.Tanh()], shape, shape)
    c = oracle.step_of(net.c, [], shape, torch.Size([3]))
    doubled = oracle.Step(a.g, lambda h: a.sigma(h).repeat(2), a.u, a.layer, 4)
    past = oracle.Step(
        lambda x, u: torch.cat([b.g(x[:4], u), x[4:]]), lambda h: b.sigma(h[:4]) + h[4:], b.u, b.layer, 4
    )
    return [doubled, past, c]


@pytest.mark.parametrize("terminal", ["sqrt", "gn"])
@pytest.mark.parametrize("kind", CURVATURES)
def test_a_residual_block_equals_joint_ddp_on_the_extended_state_with_the_ledger(
    kind: str, terminal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, X = Residual(), torch.randn(4, 3)
    y = torch.arange(len(X)) % 3
    B = len(X)
    steps = residual_steps(net)
    curvature, eta = CURVATURES[kind]
    spy = BatchSpy(monkeypatch)
    z, q = take_step(net, X, y, lr=eta, value="batch", dof=1.0, terminal=terminal, curvature=curvature)

    # backward: dense, on the extended state; columns P by the chain rule
    H = terminal_hessian(terminal, z, q, y)
    result = oracle.joint_ddp(steps, X, q.flatten(), H, eta=eta, kind=kind, options=DAMPING)
    xs = oracle.trajectory(steps, X)
    P = [torch.block_diag(*q)]
    for step, x in zip(reversed(steps), reversed(xs[:-1]), strict=True):
        P.insert(0, P[0] @ torch.block_diag(*[torch.func.jacrev(step.f, 0)(xi, step.u) for xi in x]))
    for t in range(1, 3):
        torch.testing.assert_close(spy.v[t] @ P[t], result.V_x[t], **close)
        torch.testing.assert_close(P[t].T @ spy.L[t] @ P[t], result.V_xx[t], **close)

    # forward: c_t is the sum over the layers before of <p_h, h^ - h> - <p_x, x^ - x>
    lam = torch.diag(P[-1] @ H @ P[-1].T) / torch.diag(P[-1] @ P[-1].T) ** 2
    L, v, c = [*spy.L, torch.diag(lam)], [*spy.v, torch.ones(B)], torch.zeros(B)
    x_hat = xs[0]
    for t, step in enumerate(steps):
        du = result.k[t] - eta * _solve(step, xs[t], P[t + 1], v[t + 1], L[t + 1], kind, eta, L[t + 1] @ c)
        u = step.u + oracle.applied(kind, result.M[t], eta, du)
        torch.testing.assert_close(oracle.flat_u(step.layer), u, **close)
        sigma_h = [torch.func.jacrev(step.sigma)(step.g(xi, step.u)) for xi in xs[t]]
        p_h = torch.stack([P[t + 1][i].view(B, -1)[i] @ s for i, s in enumerate(sigma_h)])[:, : step.n_h]
        # the layer's own effect: the same input x^ through the new and the old weights
        own = torch.stack([step.g(xi, u) - step.g(xi, step.u) for xi in x_hat])[:, : step.n_h]
        c = c + (p_h * own).sum(1)
        x_hat = torch.stack([step.f(xi, u) for xi in x_hat])


def _solve(
    step: oracle.Step, x: Tensor, P: Tensor, v: Tensor, L: Tensor, kind: str, eta: float, weights: Tensor
) -> Tensor:
    """(M + eta P_u' L P_u)^-1 P_u' weights, so that -eta times it is the feedback; P, v, L behind the stage."""
    B, V_next = len(x), v @ P
    sigma_h = torch.stack([torch.func.jacrev(step.sigma)(step.g(xi, step.u)) for xi in x])
    V_h = torch.einsum("bij,bi->bj", sigma_h, V_next.view(B, -1))[:, : step.n_h]
    f_u = torch.cat([torch.func.jacrev(step.f, 1)(xi, step.u) for xi in x])
    P_u = P @ f_u
    M = oracle.dense_M(kind, step, x, V_h, f_u.T @ V_next, torch.zeros_like(step.u), DAMPING)
    return torch.linalg.solve(M + eta * P_u.T @ L @ P_u, P_u.T @ weights)
