"""The feedback gains that are read off the policies."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ddpnopt import DDPNOpt
from ddpnopt._value import ValueForm
from ddpnopt.lab.paper.feedback_gains import feedback_gains

ETA = 0.3
METHOD = ValueForm("full", "cross_entropy", order=1, vxx_reg=0.0, guard=False, mean=True)


def small() -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(6, 4), torch.randint(3, (6,))


def test_the_gain_of_the_last_layer_is_its_formula() -> None:
    model, x, y = small()
    gain = feedback_gains(model, METHOD, ETA, x, lambda z: F.cross_entropy(z, y))[-1]
    with torch.no_grad():
        hidden = model[1](model[0](x))
        s = model(x).softmax(1)
        V_hh = (torch.diag_embed(s) - s[:, :, None] * s[:, None, :]) / len(x)
        VW = V_hh @ model[2].weight  # (B, classes, hidden)
        weights = -ETA * torch.einsum("bj,bon->ojn", hidden, VW).flatten(0, 1)
        bias = -ETA * VW.sum(0)
    torch.testing.assert_close(gain.dense(), torch.cat([weights, bias]))


def test_looking_at_the_gains_disturbs_neither_weights_nor_optimizer() -> None:
    model, x, y = small()
    optimizer = DDPNOpt(model)
    before = [p.detach().clone() for p in model.parameters()]
    feedback_gains(model, METHOD, ETA, x, lambda z: F.cross_entropy(z, y))
    for p, old in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(p.detach(), old)
        assert p.grad is None
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    assert F.cross_entropy(model(x), y) < loss
