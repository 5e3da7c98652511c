"""The sweep that knows the structure of layers is the general one of `ddpnopt.control`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from baseline_networks import backward, fcn, vectors, weights
from torch import Tensor, nn

from ddpnopt.control import backward as general
from ddpnopt.control.derivatives import expand
from ddpnopt.control.inputs import prepare
from ddpnopt.control.rollout import simulate
from ddpnopt.lab.baselines import VanillaDDP
from ddpnopt.lab.baselines.elementwise import elementwise_tail


class Functional(nn.Module):
    """Activations as functions and methods, a layer without bias."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 6), nn.Linear(6, 4, bias=False), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.softplus(torch.tanh(self.b(self.a(x).tanh()))))


NETWORKS = {
    "tanh, sigmoid": fcn,
    "one layer": lambda: nn.Sequential(nn.Linear(5, 3)),
    "relu, gelu": lambda: nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 4), nn.GELU(), nn.Linear(4, 3)),
    "sigmoid at the end": lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3), nn.Sigmoid()),
    "functions, no bias": Functional,
}


# 4 samples span less than the 6 inputs with bias, 9 span them all
@pytest.mark.parametrize(("B", "decay"), [(4, 0.0), (4, 0.3), (9, 0.3)])
@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_gains_and_promise_are_those_of_the_general_sweep(network, B: int, decay: float) -> None:
    model = network()
    opt = VanillaDDP(model, weight_decay=decay)
    backward(model, opt, *vectors(B))
    with torch.no_grad():
        seen = opt._passed()
        problem = opt.problem(seen)
        start = prepare(problem, torch.zeros(1), [torch.cat([p.flatten() for p in s.parameters]) for s in opt.stages])
        trajectory = simulate(start.runs, start.x0, start.u)
        mu = torch.tensor([2.0])
        mine = opt._backward(problem, start.runs, trajectory, seen)(mu)
        expansion = expand(problem, start.runs, trajectory, second_order=True)
        expected = general.backward(
            expansion, start.runs, mu, regularize="proximal", trajectory=trajectory, limits=None
        )
    assert bool(mine.ok & expected.ok)
    torch.testing.assert_close(mine.linear, expected.linear)
    torch.testing.assert_close(mine.quadratic, expected.quadratic)
    for a, b in zip((*mine.k, *mine.K), (*expected.k, *expected.K), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_both_sweeps_refuse_the_same_damping() -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    other = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    other.load_state_dict(model.state_dict())
    x, y = vectors()
    runs = []
    for m in (model, other):
        opt = VanillaDDP(m, damping=1e-6, dense=m is other)
        backward(m, opt, x, y)
        opt.step()
        runs.append(opt.report)
    assert runs[0].tries > 1
    assert runs[0] == runs[1]
    for a, b in zip(weights(model), weights(other), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


class CoupledSamples(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) - x.mean(0)


def last_bias_frozen() -> nn.Sequential:
    model = fcn()
    model[-1].bias.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    "network",
    [
        lambda: nn.Sequential(nn.Linear(5, 4), nn.Softmax(1), nn.Linear(4, 3)),
        lambda: nn.Sequential(nn.Linear(5, 4), CoupledSamples(), nn.Linear(4, 3)),
        lambda: nn.Sequential(nn.Linear(5, 4), nn.PReLU(), nn.Linear(4, 3)),
        last_bias_frozen,
    ],
    ids=["softmax", "coupled samples", "trainable activation", "frozen bias"],
)
def test_other_stages_are_left_to_the_general_sweep_and_train(network) -> None:
    model = network()
    opt = VanillaDDP(model)
    assert any(elementwise_tail(stage) is None for stage in opt.stages)
    x, y = vectors()
    before = float(backward(model, opt, x, y))
    opt.step()
    assert float(backward(model, opt, x, y)) < before
