"""KFACOptimizer and EKFACOptimizer are DDPNOpt without feedback."""

from __future__ import annotations

import copy

import pytest
import torch
from baseline_networks import assert_equal, backward, cnn, fcn, images, vectors

from ddpnopt import DDPNOpt, OptionError
from ddpnopt.curvature import kronecker as curvatures
from ddpnopt.lab.baselines import EKFACOptimizer, KFACOptimizer

PAIRS = [(KFACOptimizer, curvatures.KFAC), (EKFACOptimizer, curvatures.EKFAC)]


@pytest.mark.parametrize(("optimizer", "curvature"), PAIRS)
@pytest.mark.parametrize(("network", "data"), [(fcn, vectors), (cnn, images)])
def test_it_is_ddpnopt_without_feedback_step_for_step(optimizer, curvature, network, data) -> None:
    model = network()
    other = copy.deepcopy(model)
    one = optimizer(model, 0.05, damping=0.1, refresh=2, decay=0.6, momentum=0.5, weight_decay=0.01)
    two = DDPNOpt(
        other, 0.05, value="outer", curvature=curvature(0.1, 2, 0.6), feedback=False,
        momentum=0.5, weight_decay=0.01,
    )  # fmt: skip
    for _ in range(5):
        x, y = data()
        for m, opt in ((model, one), (other, two)):
            backward(m, opt, x, y)
            opt.step()
    assert_equal(model, other, 0, 0)


@pytest.mark.parametrize(("optimizer", "curvature"), PAIRS)
def test_defaults_are_those_of_the_curvature(optimizer, curvature) -> None:
    assert optimizer(fcn(), 0.1).curvature == curvature()


def test_kfac_solves_with_the_damped_factors_of_the_batch() -> None:
    """u - lr (G + s/pi I)^-1 J (A + s pi I)^-1 written out, s = sqrt(damping)."""
    model = fcn()
    x, y = vectors()
    opt = KFACOptimizer(model, 0.1, damping=0.04)
    layer = model[0]
    h = layer(x).detach().requires_grad_()
    p = torch.autograd.grad(torch.nn.functional.cross_entropy(model[1:](h), y, reduction="sum"), h)[0]
    inputs = torch.cat([x, torch.ones(len(x), 1)], 1)
    A, G = inputs.T @ inputs / len(x), p.T @ p / len(x)
    pi = ((A.trace() / 6) / (G.trace() / 6)).sqrt()
    J = p.T @ inputs / len(x)
    step = torch.linalg.solve(G + 0.2 / pi * torch.eye(6), J) @ torch.linalg.inv(A + 0.2 * pi * torch.eye(6))
    expected = torch.cat([layer.weight, layer.bias[:, None]], 1).detach() - 0.1 * step
    backward(model, opt, x, y)
    opt.step()
    torch.testing.assert_close(torch.cat([layer.weight, layer.bias[:, None]], 1).detach(), expected)


@pytest.mark.parametrize("optimizer", [KFACOptimizer, EKFACOptimizer])
@pytest.mark.parametrize("options", [{"damping": 0.0}, {"refresh": 0}, {"decay": 1.0}, {"lr": -1.0}])
def test_settings_out_of_range_are_named(optimizer, options) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        optimizer(fcn(), **{"lr": 0.1, **options})
