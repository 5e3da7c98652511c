"""How much of a step each layer makes: less where the slope along its own update has changed the most."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from step_runs import classes, relu_network
from test_steps_algebra import Dense, problem

from ddpnopt import DDPNOpt
from ddpnopt.ddp.stage import Displacement
from ddpnopt.ddp.value import shares
from ddpnopt.ddp.value.scale_free import ScaleFree
from ddpnopt.linear.metric import IDENTITY


@pytest.mark.parametrize("samples", [9, 70], ids=["solved together", "solved one by one"])
def test_a_layer_promises_what_its_own_update_does_to_first_order(samples: int) -> None:
    """Against dense matrices: sum_i of A_t y + prior for all samples, and without what a sample does to itself."""
    losses, stages = problem(samples=samples)
    dense = Dense(losses, stages)
    effects = []
    for stage in stages:
        update = stage.state["update"] = [torch.randn_like(part) for part in stage.u]
        effects.append((stage.p_h[0] * (stage.x @ update[0].T + update[1])).sum(1))
    value = ScaleFree(losses, Displacement(True), memory=0.4)
    for stage in reversed(stages):
        value.couple(stage, IDENTITY)
    value.evidence()
    value.ask(0.3)
    prior = 0.4 * torch.stack(effects).sum(0)
    y = torch.linalg.solve(dense.damped, dense.r - dense.root * prior)
    for stage, A, effect in zip(stages, dense.A_of, effects, strict=True):
        all_samples = (A @ y / dense.root + 0.4 * effect).sum()
        itself = (A.diagonal() * y / dense.root).sum()
        promised, unseen = stage.state["promised"]
        assert promised == pytest.approx(0.3 * float(all_samples), rel=1e-8)
        assert unseen == pytest.approx(max(0.0, 0.3 * float(all_samples - itself)), rel=1e-8)


def test_the_layer_whose_slope_has_changed_most_gets_less() -> None:
    _, stages = problem()
    for stage in stages:
        stage.state["promised"] = (2.0, 1.0)
        stage.eta = 1.0
    slopes = [-1.0] * len(stages)  # as before the step
    slopes[0] = 1.0  # as far beyond the minimum as it was before it
    shares.correct(stages, slopes)
    bends = [1.0] + [0.0] * (len(stages) - 1)
    middle = sum(bends) / len(bends)
    assert [s.eta for s in stages] == pytest.approx([math.exp(-shares.GAIN * (bend - middle)) for bend in bends])


def test_a_slope_that_has_become_steeper_counts_as_no_bend() -> None:
    """Leaving a plateau, no layer gets more than the others because its gradient grows the fastest."""
    _, stages = problem()
    for stage in stages:
        stage.state["promised"], stage.eta = (1.0, 0.1), 1.0
    shares.correct(stages, [-0.1 - 0.4 * t for t in range(len(stages))])
    assert [s.eta for s in stages] == [1.0] * len(stages)


def test_layers_that_bend_alike_keep_their_shares() -> None:
    _, stages = problem()
    for t, stage in enumerate(stages):
        stage.state["promised"], stage.eta = (2.0 + t, 0.0), 3.0
    shares.correct(stages, [0.5 * (2.0 + t) for t in range(len(stages))])
    assert [s.eta for s in stages] == pytest.approx([3.0] * len(stages))


def test_a_layer_without_slope_or_promise_does_not_count() -> None:
    """One that was frozen, or took no part in the last step, or whose slope has no finite value."""
    _, stages = problem()
    for stage in stages:
        stage.eta = 1.0
    stages[0].state["promised"] = (1.0, 1.0)
    shares.correct(stages, [math.nan] * len(stages))
    assert [s.eta for s in stages] == [1.0] * len(stages)
    stages[0].state["promised"] = (1.0, 1.0)
    shares.correct(stages, [0.3] * len(stages))
    assert [s.eta for s in stages] == pytest.approx([1.0] * len(stages))  # the only one is the mean


def test_a_promise_counts_once() -> None:
    """A layer that takes no part in a step has nothing to compare the next slope with."""
    _, stages = problem()
    stages[0].state["promised"] = (1.0, 1.0)
    shares.correct(stages, [0.0] * len(stages))
    found = stages[0].state["bend"]
    shares.correct(stages, [0.0] * len(stages))
    assert stages[0].state["bend"] == found


def test_shares_go_on_after_a_checkpoint() -> None:
    torch.manual_seed(0)
    model, (x, y) = relu_network(), classes(steps=1)[0]
    opt = DDPNOpt(model)
    for _ in range(4):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
    kept = opt.state_dict()
    other = relu_network()
    other.load_state_dict(model.state_dict())
    resumed = DDPNOpt(other)
    resumed.load_state_dict(kept)
    for m, o in ((model, opt), (other, resumed)):
        o.zero_grad()
        F.cross_entropy(m(x), y).backward()
        o.step()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b)
