"""Training continues bit for bit from the state of automatic steps, saved at any step."""

from __future__ import annotations

import io
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from step_runs import classes, relu_network, targets, weights
from torch import Tensor, nn

from ddpnopt import DDPNOpt, NonFiniteError
from ddpnopt._step import Step

STEPS = 10


class Mixed(nn.Module):
    """Layers with feedback of several kinds and a parameter without."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv1d(2, 4, 2, groups=2), nn.LayerNorm(12), nn.Linear(12, 3)
        self.gain = nn.Parameter(torch.ones(12))

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.conv(torch.stack([x, x.square()], 1)))
        return self.out(torch.sort(self.gain).values * self.norm(h.flatten(1)))  # a function that is not watched


def network(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return Mixed() if kind == "mixed" else relu_network()


def step(model: nn.Module, opt: DDPNOpt, t: int, kind: str) -> None:
    opt.zero_grad()
    if kind == "unknown loss":
        x, y = targets(t, steps=1)[0]
        (model(x) - y).abs().pow(1.5).mean().backward()
    else:
        x, y = classes(t, steps=1)[0]
        F.cross_entropy(model(x), y).backward()
    opt.step()


@pytest.mark.filterwarnings("ignore::ddpnopt.OpenLoopWarning", "ignore::ddpnopt.UncertainLossWarning")
@pytest.mark.parametrize("kind", ["relu", "mixed", "unknown loss"])
@pytest.mark.parametrize("at", range(1, 7))
def test_training_continues_bit_for_bit_from_a_checkpoint(kind: str, at: int) -> None:
    model = network(kind)
    opt = DDPNOpt(model)
    for t in range(at):
        step(model, opt, t, kind)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)
    file.seek(0)
    for t in range(at, STEPS):
        step(model, opt, t, kind)

    saved = torch.load(file, weights_only=True)
    torch.manual_seed(at + 100)
    again = Mixed() if kind == "mixed" else relu_network(5)
    resumed = DDPNOpt(again)
    again.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["opt"])
    for t in range(at, STEPS):
        step(again, resumed, t, kind)
    assert torch.equal(weights(again), weights(model))
    assert resumed._length == opt._length
    assert resumed._distance == opt._distance
    assert (opt._distance.steps > 0) is (kind == "mixed")


def frozen(state: object) -> object:
    """Comparable: tensors as lists, without empty entries."""
    if isinstance(state, Tensor):
        return state.tolist()
    if isinstance(state, dict):
        return {key: made for key, value in state.items() if (made := frozen(value)) != {}}
    return [frozen(each) for each in state] if isinstance(state, list) else state


@pytest.mark.filterwarnings("ignore::ddpnopt.OpenLoopWarning")
@pytest.mark.parametrize("steps", [0, 1, 4])
@pytest.mark.parametrize("trouble", ["inputs", "after the sweep", "overflow"])
def test_an_error_leaves_weights_and_state_as_they_were(
    trouble: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = network("mixed") if trouble != "overflow" else relu_network()
    opt = DDPNOpt(model)
    for t in range(steps):
        step(model, opt, t, "mixed")
    before = deepcopy((weights(model), frozen(opt.state_dict())))
    x, y = classes(99, steps=1)[0]
    if trouble == "inputs":
        x[0, 0] = torch.nan
    if trouble == "overflow":  # finite gradients with an infinite Gram matrix
        x = 1e200 * x
    opt.zero_grad()
    F.cross_entropy(model(x), y).backward()
    if trouble == "after the sweep":
        monkeypatch.setattr("ddpnopt._step.finite_sum", lambda tensors: torch.nan)
        monkeypatch.setattr("ddpnopt._step.Step.agree", agree_without_check())
    with pytest.raises(NonFiniteError):
        opt.step()
    assert torch.equal(weights(model), before[0])
    assert frozen(opt.state_dict()) == before[1]


def agree_without_check() -> Callable[[Step], bool]:
    real = Step.agree

    def agree(self: Step) -> bool:
        self._gradient_sum = 0.0
        return real(self)

    return agree
