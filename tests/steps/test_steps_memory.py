"""The memory of automatic steps: the prior of a step is what the last one has left undone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from step_runs import classes, relu_network, weights
from test_steps_algebra import Dense, problem
from torch import Tensor, nn

from ddpnopt import DDPNOpt
from ddpnopt._step import Step
from ddpnopt.ddp.stage import Displacement
from ddpnopt.ddp.value.scale_free import ScaleFree
from ddpnopt.linear.metric import IDENTITY


@pytest.mark.parametrize("samples", [9, 70], ids=["solved together", "solved one by one"])
def test_a_step_solves_the_ridge_regression_around_its_prior(samples: int) -> None:
    """phi = m + eta M^-1 P w minimises |r - J phi|^2 + damping |phi - m|^2: against dense matrices."""
    losses, stages = problem(samples=samples)
    dense = Dense(losses, stages)
    last = [[torch.randn_like(part) for part in stage.u] for stage in stages]
    effects = []  # of the last update on each sample, per stage
    for stage, update in zip(stages, last, strict=True):
        stage.state["update"] = update
        effects.append((stage.p_h[0] * (stage.x @ update[0].T + update[1])).sum(1))
    value = ScaleFree(losses, Displacement(True), memory=0.4)
    solvers = [value.couple(stage, IDENTITY)[1] for stage in reversed(stages)][::-1]
    found = value.evidence()
    value.ask(0.3)
    damping = dense.damped - dense.A

    prior = 0.4 * torch.stack(effects).sum(0)
    y = torch.linalg.solve(dense.damped, dense.r - dense.root * prior)
    achieved = dense.A @ y + dense.root * prior
    loss = 0.5 * float(dense.r @ dense.r)
    assert found.own == pytest.approx(float(dense.r @ achieved) / loss, rel=1e-8)
    assert found.own_curvature == pytest.approx(float(achieved @ achieved) / loss, rel=1e-8)
    assert value.slope == pytest.approx(-float(torch.stack(effects).sum()), rel=1e-9)
    for t, solve in enumerate(solvers):
        ahead = 0.4 * torch.stack(effects[t:]).sum(0)  # what the prior of this stage and those after it will do
        c = 0.003 * torch.randn(samples)  # so small that no reaction is bounded
        target = 0.3 * (dense.r - dense.root * ahead) + dense.root * c
        A = torch.stack(dense.A_of[t:]).sum(0)
        expected = dense.root * torch.linalg.solve(A + damping, target)
        torch.testing.assert_close(solve(c), expected, rtol=1e-8, atol=1e-10)
        ((factor, kept),) = stages[t].prior
        assert factor == 0.4
        torch.testing.assert_close(kept, last[t])


def test_samples_left_out_know_the_prior_and_not_themselves() -> None:
    losses, stages = problem()
    dense = Dense(losses, stages)
    for stage in stages:
        stage.state["update"] = [torch.randn_like(part) for part in stage.u]
    effect = sum((s.p_h[0] * (s.x @ s.state["update"][0].T + s.state["update"][1])).sum(1) for s in stages)
    assert isinstance(effect, Tensor)
    value = ScaleFree(losses, Displacement(True), memory=1.0)
    for stage in reversed(stages):
        value.backward(stage, IDENTITY)
    found = value.evidence()
    prior, n = dense.root * effect, len(losses)
    without = []
    for i in range(n):
        others = [j for j in range(n) if j != i]
        y = torch.linalg.solve(dense.damped[others][:, others], (dense.r - prior)[others])
        without.append(prior[i] + dense.A[i, others] @ y)
    loss = 0.5 * float(dense.r @ dense.r)
    assert found.unseen == pytest.approx(float(dense.r @ torch.stack(without)) / loss, rel=1e-8)


def test_a_step_that_reaches_the_minimum_along_itself_leaves_no_memory() -> None:
    """A linear least-squares problem, always the same batch: a whole step leaves nothing to do."""
    torch.manual_seed(0)
    model, x = nn.Linear(4, 1), torch.randn(3, 4)
    y = torch.randn(3, 1)
    opt = DDPNOpt(model)
    for _ in range(18):
        opt.zero_grad()
        F.mse_loss(model(x), y).backward()
        opt.step()
    assert F.mse_loss(model(x), y).item() < 1e-6
    assert opt._length.memory * opt._length.taken < 0.5


def test_a_batch_without_loss_drops_the_prior() -> None:
    model = relu_network()
    opt = DDPNOpt(model)
    for x, y in classes(steps=4):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
    assert opt._length.memory > 0
    before = weights(model)
    opt.zero_grad()
    (0.0 * F.cross_entropy(model(x), y)).backward()
    opt.step()
    assert torch.equal(weights(model), before)


@pytest.mark.parametrize("decay", [1e-3, 1.0, 1e3])
def test_weight_decay_of_any_size_shrinks_without_overshooting(decay: float) -> None:
    """In the mean over three networks: with labels at random, a small decay is hidden by the way of a single one."""
    shrunk = free = 0.0
    for seed in range(3):
        sizes = _sizes(seed, decay)
        assert max(sizes) < 10 * sizes[0]
        shrunk, free = shrunk + sizes[-1], free + _sizes(seed, 0.0)[-1]
    assert shrunk < free


def _sizes(seed: int, decay: float) -> list[float]:
    """Those of all weights after each step."""
    model = relu_network(seed)
    opt = DDPNOpt(model, weight_decay=decay)
    sizes = []
    for x, y in classes(seed, steps=30, samples=16):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
        sizes.append(weights(model).norm().item())
    assert opt.report.undone <= 1
    return sizes


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(6, 8), nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 3)])

    def forward(self, x: Tensor, which: int) -> Tensor:
        out: Tensor = self.heads[which](self.body(x).tanh())
        return out


def test_a_layer_that_skips_a_step_starts_the_next_one_without_memory() -> None:
    """Its last update is that of another step, with another fraction, than the one that the memory is measured on."""
    model = TwoHeads()
    opt = DDPNOpt(model)
    x, y = torch.randn(16, 6), torch.arange(16) % 3
    for which in (0, 0, 1):
        opt.zero_grad()
        F.cross_entropy(model(x, which), y).backward()
        opt.step()
    first, second = (head.weight for head in model.heads)
    assert isinstance(first, nn.Parameter)
    assert isinstance(second, nn.Parameter)
    assert "update" not in opt.state[first]
    assert "update" in opt.state[second]
    assert "update" in opt.state[model.body.weight]


@pytest.mark.parametrize("shape", [(8, 200), (4, 3, 200)])
def test_the_update_of_a_large_layer_has_the_memory_of_the_last_one_and_can_be_undone(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 160), nn.Tanh(), nn.Linear(160, 3)).double()
    opt, batches = DDPNOpt(model), [torch.randn(shape).double() for _ in range(4)]

    def step(x: Tensor) -> None:
        opt.zero_grad()
        (model(x) - 1).square().mean().backward()
        opt.step()

    for x in batches[:2]:
        step(x)
    first: nn.Parameter = model[0].weight
    last = opt.state[first]["update"]
    before = [part.clone() for part in last]
    weights = [p.detach().clone() for p in model.parameters()]

    def fail(*_: object) -> bool:
        assert not torch.equal(first, weights[0])
        assert not torch.equal(last[0], before[0])
        raise RuntimeError("after the update")

    with monkeypatch.context() as patched:
        patched.setattr(Step, "accept", fail)
        with pytest.raises(RuntimeError, match="after the update"):
            step(batches[2])
    restored = [*model.parameters(), *opt.state[first]["update"]]
    for now, then in zip(restored, [*weights, *before], strict=True):
        torch.testing.assert_close(now.detach(), then)
    step(batches[3])
    assert opt.state[first]["update"][0].data_ptr() == last[0].data_ptr()
