"""What a step of each baseline costs."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from baseline_networks import backward, cnn, fcn, images, vectors
from torch import nn

from ddpnopt.control.inputs import prepare
from ddpnopt.lab.baselines import EMSA, SGDVGR, EKFACOptimizer, KFACOptimizer, VanillaDDP
from ddpnopt.lab.data import Dataset
from ddpnopt.lab.networks import cnn as papers_cnn


def seconds(step: Callable[[], None]) -> float:
    """Time of this process alone: what others do on the machine does not count."""
    start = time.process_time()
    step()
    return time.process_time() - start


@pytest.mark.parametrize("kind", [KFACOptimizer, EKFACOptimizer])
def test_with_a_refresh_every_ten_steps_a_step_costs_at_most_three_of_sgd(kind) -> None:
    torch.set_default_dtype(torch.float32)
    x, y = torch.randn(128, 1, 28, 28), torch.randint(10, (128,))
    data = Dataset("mnist", x, y, x, y, 10)
    steps = []
    for make in (lambda m: torch.optim.SGD(m.parameters(), 0.01), lambda m: kind(m, 0.01)):
        model = papers_cnn(data)
        optimizer = make(model)

        def step(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            backward(model, optimizer, x, y)
            optimizer.step()

        steps.append(step)
    steps[0]()  # the first pass of all warms up
    refresh = seconds(steps[1])
    sgd, plain = (min(times) for times in zip(*[[seconds(step) for step in steps] for _ in range(3)], strict=True))
    assert (9 * plain + refresh) / 10 < 3 * sgd


@pytest.mark.parametrize(("network", "data"), [(fcn, vectors), (cnn, images)])
def test_emsa_runs_the_network_once_and_its_stages_a_bounded_number_of_times(network, data, monkeypatch) -> None:
    model = network()
    opt = EMSA(model, max_iter=4)
    passes: list[None] = []
    model.register_forward_hook(lambda *_: passes.append(None))
    calls: list[None] = []
    evaluate = type(opt.stages[0]).__call__
    monkeypatch.setattr(type(opt.stages[0]), "__call__", lambda *a: (calls.append(None), evaluate(*a))[1])
    x, y = data()
    backward(model, opt, x, y)
    opt.step()
    assert len(passes) == 1
    # one for p_0; for each layer one at the start and, 4 times, a line search that rarely needs more than two
    assert len(opt.stages) < len(calls) <= 1 + len(opt.stages) * (1 + 4 * 3)


@pytest.mark.parametrize("B", [4, 8])
def test_vanilla_ddp_has_the_whole_batch_as_its_state(B: int) -> None:
    model = fcn()
    opt = VanillaDDP(model)
    x, y = vectors(B)
    backward(model, opt, x, y)
    with torch.no_grad():
        problem = opt.problem(opt._passed())
        u = [torch.cat([p.flatten() for p in stage.parameters]) for stage in opt.stages]
        runs = prepare(problem, torch.zeros(1), u).runs
    assert [run.n for run in runs] == [1, B * 6, B * 4]  # x_0 is data, not state
    assert [run.n_next for run in runs] == [B * 6, B * 4, B * 3]
    assert [run.m for run in runs] == [5 * 6 + 6, 6 * 4 + 4, 4 * 3 + 3]


def test_sgd_vgr_runs_the_network_once() -> None:
    model = fcn()
    opt = SGDVGR(model, 0.1)
    passes: list[None] = []
    model.register_forward_hook(lambda *_: passes.append(None))
    x, y = vectors()
    opt.zero_grad()
    F.cross_entropy(model(x), y).backward()
    opt.step()
    assert len(passes) == 1
