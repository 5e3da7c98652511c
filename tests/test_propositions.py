"""The propositions of the paper, each a test by name."""

from __future__ import annotations

import copy

import oracle
import pytest
import torch
import torch.nn.functional as F
from test_oracle_per_sample import CURVATURES, NETS, Spy, take_step
from torch import nn

from ddpnopt import DDPNOpt


@pytest.fixture(autouse=True)
def _float64() -> None:
    torch.set_default_dtype(torch.float64)


@pytest.mark.parametrize("name", NETS)
def test_proposition_1_without_Q_ux_the_value_gradient_is_back_propagation(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, X = NETS[name]()
    y = torch.arange(len(X)) % 3
    plain = copy.deepcopy(net)
    inputs = []
    for module in plain:
        if hasattr(module, "weight"):
            module.register_forward_pre_hook(lambda _, args: (inputs.append(args[0]), args[0].requires_grad_())[0])
    F.cross_entropy(plain(X.clone().requires_grad_()), y).backward(inputs=[*plain.parameters()])
    spy = Spy(monkeypatch)
    # a terminal Hessian of zero makes Q_ux vanish at all stages
    zero = lambda z: z.new_zeros(len(z), z.shape[1], z.shape[1])  # noqa: E731
    take_step(net, X, y, lr=0.3, value="full", terminal=zero)
    loss = F.cross_entropy(plain(X), y)
    for t, x in enumerate(inputs[-len(spy.V) :]):
        if t:
            gradient = torch.autograd.grad(loss, x, retain_graph=True)[0]
            torch.testing.assert_close(spy.V[t][0], gradient.flatten(1), rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        for p in plain.parameters():
            p -= 0.3 * p.grad
    for new, gd in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(new, gd, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", CURVATURES)
@pytest.mark.parametrize("name", NETS)
def test_proposition_1_without_Q_ux_ddp_is_the_optimizer_it_takes_its_curvature_from(name: str, kind: str) -> None:
    net, X = NETS[name]()
    y = torch.arange(len(X)) % 3
    base = copy.deepcopy(net)
    curvature, eta = CURVATURES[kind]
    zero = lambda z: z.new_zeros(len(z), z.shape[1], z.shape[1])  # noqa: E731
    opt = DDPNOpt(net, eta, value="full", terminal=zero, curvature=curvature)
    opt_base = DDPNOpt(base, eta, feedback=False, curvature=curvature)
    for _ in range(3):
        for model, optimizer in ((net, opt), (base, opt_base)):
            optimizer.zero_grad()
            F.cross_entropy(model(X), y).backward()
            optimizer.step()
    for p, q in zip(net.parameters(), base.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", CURVATURES)
@pytest.mark.parametrize("name", NETS)
def test_proposition_2_the_value_hessian_is_an_outer_product_at_all_layers(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ddpnopt.ddp.value import Outer

    net, X = NETS[name]()
    y = torch.arange(len(X)) % 3
    steps = oracle.steps_of(net, X)
    curvature, eta = CURVATURES[kind]
    eta = eta / 100  # s < 1, as the proposition assumes
    found = []
    real = Outer.backward

    def backward(value, problem, metric):
        policy = real(value, problem, metric)
        found.insert(0, (value.L, problem.p_x[0], value.v))
        return policy

    monkeypatch.setattr(Outer, "backward", backward)
    _, q = take_step(net, X, y, lr=eta, value="outer", terminal="gn", curvature=curvature, guard=False, recompute=False)
    dense = oracle.ddp(
        steps, X, q, q[:, :, None] * q[:, None, :], eta=eta, kind=kind, options={"damping": 0.1}
    )  # fmt: skip
    for t in range(1, len(steps)):
        L, p, v = found[t]
        z = L.sqrt()[:, None] * p.flatten(1)
        torch.testing.assert_close(z[:, :, None] * z[:, None, :], dense.V_xx[t], rtol=1e-10, atol=1e-14)
        torch.testing.assert_close(v[:, None] * p.flatten(1), dense.V_x[t], rtol=1e-10, atol=1e-14)
        rank = torch.linalg.matrix_rank(dense.K[t], rtol=1e-9)  # Q_ux = q_u q_x' and so K is of rank one
        assert int(rank.max()) <= 1


def test_the_collapsed_and_the_general_factored_form_agree() -> None:
    net, X = NETS["cnn"]()
    y = torch.arange(len(X)) % 3
    other = copy.deepcopy(net)
    _, q = take_step(net, X, y, lr=0.5, value="outer", terminal="gn", weight_decay=0.1)
    # the gradient handed in as if it were any factor: q is grad/B, a factor of the samples' own Hessian is sqrt(B) q
    take_step(other, X, y, lr=0.5, value="outer", terminal=lambda z: q * len(z) ** 0.5, weight_decay=0.1)
    for p, r in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, r, rtol=1e-11, atol=1e-11)


def test_second_order_dynamics_differ_from_first_order() -> None:
    net, X = NETS["fcn"]()
    y = torch.arange(len(X)) % 3
    other: nn.Sequential = copy.deepcopy(net)
    take_step(net, X, y, lr=0.5, value="full", terminal="cross_entropy", order=1)
    take_step(other, X, y, lr=0.5, value="full", terminal="cross_entropy", order=2)
    assert (net[2].weight - other[2].weight).abs().max() > 1e-4
