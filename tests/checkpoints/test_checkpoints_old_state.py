"""A state saved by version 0.1.0 loads, and training continues as it did there."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from ddpnopt import DDPNOpt
from ddpnopt.checkpoint import load

SAVED = Path(__file__).with_name("state-0.1.0.pt")  # after 30 steps; "model_after" is 0.1.0's model after five more


def test_a_state_of_version_0_1_0_continues_identically() -> None:
    saved = load(SAVED)
    assert saved["opt"]["ddpnopt"]["version"] == "0.1.0"
    with torch.random.fork_rng():
        model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 10))
    model.load_state_dict(saved["model"])
    opt = DDPNOpt(model, lr=3.0)
    opt.load_state_dict(saved["opt"])
    assert (opt.steps, opt.samples) == (30, 960)
    generator = torch.Generator().manual_seed(2)
    for _ in range(5):
        x, y = torch.rand(32, 64, generator=generator), torch.randint(10, (32,), generator=generator)
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
    for name, weight in model.state_dict().items():
        # to rounding: another processor may add in another order
        torch.testing.assert_close(weight, saved["model_after"][name], rtol=1e-4, atol=1e-6)
        assert not torch.equal(weight, saved["model"][name])


def test_a_state_of_version_0_1_0_loads_into_the_default_which_then_starts_with_a_small_step() -> None:
    saved = load(SAVED)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 10))
    model.load_state_dict(saved["model"])
    opt = DDPNOpt(model)
    opt.load_state_dict(saved["opt"])
    assert [group["lr"] for group in opt.param_groups] == [1.0]
    loss = F.cross_entropy(model(torch.rand(32, 64)), torch.randint(10, (32,)))
    loss.backward()
    opt.step()
    moved = max(float((p.detach() - saved["model"][n]).norm() / p.norm()) for n, p in model.named_parameters())
    assert 0 < moved < 0.1
