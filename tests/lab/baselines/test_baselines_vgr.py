"""SGD-VGR: the gradient of the penalty, and SGD around it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from baseline_networks import assert_equal, backward, fcn, vectors
from torch import Tensor, nn

from ddpnopt.lab.baselines import SGDVGR
from ddpnopt.lab.baselines.vgr import SMALL


def penalty(model: nn.Sequential, x: Tensor, y: Tensor) -> Tensor:
    """Omega by autograd: delta and sigma' detached, W_t alone in the graph."""
    states, hs = [x.clone().requires_grad_()], []
    for module in model:
        out = module(states[-1] if isinstance(module, nn.Linear) else hs[-1])
        (hs if isinstance(module, nn.Linear) else states).append(out)
    if len(states) == len(hs):
        states.append(hs[-1] * 1.0)
    loss = F.cross_entropy(states[-1], y)
    deltas = [d.detach() for d in torch.autograd.grad(loss, states[1:], retain_graph=True)]
    through = [d.detach() for d in torch.autograd.grad(loss, hs, retain_graph=True)]
    total = torch.zeros(())
    for layer, delta, v in zip((m for m in model if isinstance(m, nn.Linear)), deltas, through, strict=True):
        for d, one in zip(delta, v, strict=True):
            if (d**2).sum() >= SMALL:
                r = ((layer.weight.T @ one) ** 2).sum() / (d**2).sum()
                total = total + (r - 1) ** 2 / len(x)
    return total


@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e-12])
def test_penalty_gradient_equals_autograd_with_delta_detached(scale: float) -> None:
    """A last layer that is nearly zero makes the deltas before it so small that they are left out."""
    model = fcn()
    with torch.no_grad():
        model[-1].weight.mul_(scale)
    x, y = vectors()
    linears = [m for m in model if isinstance(m, nn.Linear)]
    expected = torch.autograd.grad(penalty(model, x, y), [m.weight for m in linears], materialize_grads=True)
    opt = SGDVGR(model, 0.1)
    backward(model, opt, x, y)
    with torch.no_grad():
        mine = opt.penalty_gradients(opt._passed())
    for a, b in zip(mine, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    assert bool((mine[0] == 0).all()) == (scale == 1e-12)


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "weight_decay": 0.01}])
def test_without_weight_it_is_sgd(options) -> None:
    model = fcn()
    other = copy.deepcopy(model)
    pairs = [(model, SGDVGR(model, 0.1, weight=0.0, **options))]
    pairs.append((other, torch.optim.SGD(other.parameters(), 0.1, **options)))
    for _ in range(4):
        x, y = vectors()
        for m, opt in pairs:
            backward(m, opt, x, y)
            opt.step()
    assert_equal(model, other)


def test_a_step_adds_twice_the_penalty_gradient_to_the_weights_alone() -> None:
    model = fcn()
    x, y = vectors()
    linears = [m for m in model if isinstance(m, nn.Linear)]
    extra = torch.autograd.grad(penalty(model, x, y), [m.weight for m in linears])
    plain = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    expected = [p - 0.1 * g for p, g in zip(model.parameters(), plain, strict=True)]
    for t, g in enumerate(extra):
        expected[2 * t] = expected[2 * t] - 0.1 * 2.0 * g
    opt = SGDVGR(model, 0.1)
    backward(model, opt, x, y)
    opt.step()
    for p, e in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.detach(), e.detach())


def test_it_keeps_the_gradient_alive_through_nine_sigmoid_layers() -> None:
    layers: list[nn.Module] = []
    for _ in range(8):
        layers += [nn.Linear(5, 5), nn.Sigmoid()]
    model = nn.Sequential(*layers, nn.Linear(5, 3))
    plain = copy.deepcopy(model)
    x, y = vectors(16)
    norms = []
    for m, opt in ((model, SGDVGR(model, 0.05)), (plain, torch.optim.SGD(plain.parameters(), 0.05))):
        for _ in range(100):
            backward(m, opt, x, y)
            opt.step()
        norms.append(float(m[0].weight.grad.norm()))
    assert norms[0] > 10 * norms[1]
