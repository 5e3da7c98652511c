"""The adaptive diagonals with feedback: a parameter moves no further than it could without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt import DDPNOpt
from ddpnopt.curvature.diagonal import Adam, RMSprop

LR = 0.01
# |d| / sqrt(v) with v >= (1 - decay) d^2; Adam's first average adds up past directions
FURTHEST = {"rmsprop": LR * 10.0, "adam": LR * (1 - 0.9) / (1 - 0.999) ** 0.5 * 3}


def silent(seed: int = 0) -> nn.Sequential:
    """Weights into the last layer whose gradient is almost zero: its inputs are."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    with torch.no_grad():
        net[2].weight[:3] *= 1e-9
        net[2].bias[:3] *= 1e-9
    return net


def moved(net: nn.Sequential, before: list[Tensor]) -> float:
    return max(float((p.detach() - old).abs().max()) for p, old in zip(net.parameters(), before, strict=True))


@pytest.mark.parametrize("terminal", ["gn", "cross_entropy"])
@pytest.mark.parametrize("guard", [True, False])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("kind", ["rmsprop", "adam"])
def test_feedback_moves_no_weight_further_than_the_base_optimizer_could(
    kind: str, whole: bool, guard: bool, terminal: str
) -> None:
    net = silent()
    curvature: Any = RMSprop(whole=whole) if kind == "rmsprop" else Adam(whole=whole)
    opt = DDPNOpt(
        net, LR, value="full", terminal=terminal, curvature=curvature, guard=guard, vxx_power=1, on_nonfinite="skip"
    )
    generator = torch.Generator().manual_seed(1)
    for _ in range(30):
        x, y = torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator)
        before = [p.detach().clone() for p in net.parameters()]
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step()
        assert moved(net, before) <= FURTHEST[kind] * 1.01


@pytest.mark.parametrize("kind", ["rmsprop", "adam"])
def test_what_m_sees_makes_no_difference_without_feedback(kind: str) -> None:
    kinds = {"rmsprop": RMSprop, "adam": Adam}
    nets = [silent(), silent()]
    for net, whole in zip(nets, (False, True), strict=True):
        opt = DDPNOpt(net, LR, curvature=kinds[kind](whole=whole), feedback=False)
        generator = torch.Generator().manual_seed(1)
        for _ in range(5):
            x, y = torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator)
            opt.zero_grad()
            F.cross_entropy(net(x), y).backward()
            opt.step()
    for a, b in zip(*(net.parameters() for net in nets), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
