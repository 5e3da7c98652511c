"""E-MSA: each layer minimises its augmented Hamiltonian against the same frozen trajectory."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from baseline_networks import Written, assert_equal, backward, cnn, fcn, images, vectors, weights
from torch import nn

from ddpnopt.lab.baselines import EMSA

NETWORKS = [(fcn, vectors), (cnn, images), (Written, images)]


@pytest.mark.parametrize(("network", "data"), NETWORKS)
def test_a_step_decreases_the_augmented_hamiltonian_of_every_layer(network, data) -> None:
    model = network()
    opt = EMSA(model, rho=1.0)
    x, y = data()
    backward(model, opt, x, y)
    problems = opt.hamiltonians(opt._passed())
    before = [float(problem(problem.f.parameters).detach()) for problem in problems]
    opt.step()
    after = [float(problem(problem.f.parameters).detach()) for problem in problems]
    assert len(before) == sum(isinstance(m, (nn.Linear, nn.Conv2d)) for m in model.modules())
    assert all(b < a for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize(("network", "data"), NETWORKS)
def test_it_starts_from_the_gradient_of_the_loss_and_the_weight_penalty(network, data) -> None:
    """At the current weights both feasibility penalties vanish with their gradients."""
    model = network()
    x, y = data()
    expected = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    opt = EMSA(model, rho=3.0, reg=0.1)
    backward(model, opt, x, y)
    with torch.no_grad():
        problems = opt.hamiltonians(opt._passed())
    mine = [g for f in problems for g in torch.autograd.grad(f(f.f.parameters), f.f.parameters)]
    order = [p for f in problems for p in f.f.parameters]
    wanted = dict(zip(model.parameters(), expected, strict=True))
    for p, g in zip(order, mine, strict=True):
        torch.testing.assert_close(g, wanted[p] + 0.1 * p.detach())


def by_hand(x, x_next, p, p_next, layer, activation, rho, reg, max_iter):
    """L-BFGS on one fully connected layer with the formulas written out: H_x = (sigma' . p_next) W."""
    W, b = (w.detach().clone().requires_grad_() for w in (layer.weight, layer.bias))
    lbfgs = torch.optim.LBFGS([W, b], max_iter=max_iter, line_search_fn="strong_wolfe")

    def closure():
        lbfgs.zero_grad()
        h = x @ W.T + b
        f = activation(h)
        slope = {torch.tanh: 1 - f**2, torch.sigmoid: f * (1 - f)}.get(activation, torch.ones_like(f))
        H_x = (slope * p_next) @ W
        H = (p_next * f).sum() - 0.5 * reg * ((W**2).sum() + (b**2).sum())
        value = -H + 0.5 * rho * ((x_next - f) ** 2).sum() + 0.5 * rho * ((p - H_x) ** 2).sum()
        value.backward()
        return value

    lbfgs.step(closure)
    return W.detach(), b.detach()


@pytest.mark.parametrize("rho", [0.03, 1.0])
def test_every_layer_equals_a_hand_written_lbfgs_on_the_frozen_trajectory(rho: float) -> None:
    model = fcn()
    x0, y = vectors()
    xs = [x0.clone().requires_grad_()]
    activations = [torch.tanh, torch.sigmoid, lambda h: h]
    layers = [m for m in model if isinstance(m, nn.Linear)]
    for layer, activation in zip(layers, activations, strict=True):
        xs.append(activation(layer(xs[-1])))
    ps = [-g for g in torch.autograd.grad(F.cross_entropy(xs[-1], y), xs)]
    expected = [
        by_hand(xs[t].detach(), xs[t + 1].detach(), ps[t], ps[t + 1], layers[t], activations[t], rho, 1e-3, 7)
        for t in range(3)
    ]
    opt = EMSA(model, rho=rho, reg=1e-3, max_iter=7)
    backward(model, opt, x0, y)
    opt.step()
    for layer, (W, b) in zip(layers, expected, strict=True):
        torch.testing.assert_close(layer.weight.detach(), W, rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(layer.bias.detach(), b, rtol=1e-9, atol=1e-10)


def test_whatever_has_parameters_behind_a_layer_belongs_to_its_stage() -> None:
    model = Written()
    opt = EMSA(model)
    assert [len(stage.parameters) for stage in opt.stages] == [4, 2]  # convolution with its norm, linear
    x, y = images()
    before = weights(model)
    backward(model, opt, x, y)
    opt.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize(("network", "data"), NETWORKS)
def test_it_trains_in_the_ordinary_loop_and_with_a_closure(network, data) -> None:
    model = network()
    other = copy.deepcopy(model)
    opt, second = EMSA(model, rho=1.0), EMSA(other, rho=1.0)
    x, y = data()
    losses = []
    for _ in range(8):
        losses.append(float(backward(model, opt, x, y)))
        opt.step()
        assert second.step(lambda: backward(other, second, x, y)) == losses[-1]
    assert losses[-1] < 0.8 * losses[0]
    assert_equal(model, other, 0, 0)


def test_larger_rho_stays_nearer_to_the_old_weights() -> None:
    model = fcn()
    start = weights(model)
    x, y = vectors()
    moved = []
    for rho in (0.1, 1.0, 10.0):
        one = copy.deepcopy(model)
        opt = EMSA(one, rho=rho)
        backward(one, opt, x, y)
        opt.step()
        moved.append(sum(float((a - b.detach()).square().sum()) for a, b in zip(start, one.parameters(), strict=True)))
    assert moved[0] > moved[1] > moved[2]


def test_float32_and_state_dict() -> None:
    model = fcn().float()
    opt = EMSA(model)
    x, y = vectors()
    backward(model, opt, x.float(), y)
    opt.step()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    again = EMSA(model, rho=5.0)
    again.load_state_dict(opt.state_dict())
    assert again.param_groups[0]["rho"] == 0.03


def test_channels_last_in_memory_make_no_difference() -> None:
    found = []
    for order in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(48, 3))
        model.to(memory_format=order)  # type: ignore[call-overload]
        x, y = torch.randn(4, 2, 4, 4), torch.randint(3, (4,))
        optimizer = EMSA(model)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
