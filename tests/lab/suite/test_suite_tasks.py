"""Every task of the suite builds, trains and measures; the same seed gives the same run."""

from __future__ import annotations

import math
from itertools import islice

import pytest
import torch
from torch.optim import Adam

from ddpnopt.lab.suite import TASKS, SuiteProblem, SuiteTask, open_tasks, sealed_tasks

POSITIVE = {
    "squared error",
    "absolute error",
    "relative error",
    "end-point error",
    "sliced distance",
    "excess length",
    "nats per picture",
    "pinball loss",
    "deviance",
    "cost",
}

each_task = pytest.mark.parametrize("task", TASKS.values(), ids=TASKS.keys())


def in_range(metric: str, value: float) -> bool:
    if "%" in metric:
        return 0 <= value <= 100
    return math.isfinite(value) and (metric not in POSITIVE or value >= 0)


def first_batches(problem: SuiteProblem, seed: int, number: int = 3) -> list[tuple[torch.Tensor, ...]]:
    return list(islice(problem.batches(torch.Generator().manual_seed(seed)), number))


def loss_with_fixed_noise(problem: SuiteProblem, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    torch.manual_seed(0)
    return problem.loss(batch)


@each_task
def test_a_small_adam_step_lowers_the_loss_of_its_batch(task: SuiteTask) -> None:
    problem = task.build(0)
    batch = first_batches(problem, 0, 1)[0]
    optimizer = Adam(problem.model.parameters(), lr=1e-5)
    before = loss_with_fixed_noise(problem, batch)
    assert before.dim() == 0
    before.backward()
    gradients = [parameter.grad for parameter in problem.model.parameters() if parameter.requires_grad]
    assert all(gradient is not None and torch.isfinite(gradient).all() for gradient in gradients)
    optimizer.step()
    after = loss_with_fixed_noise(problem, batch)
    assert after.item() < before.item()


@each_task
def test_metrics_are_in_range_and_leave_the_model_in_training_mode(task: SuiteTask) -> None:
    problem = task.build(0)
    problem.model.train()
    values = [problem.evaluate("validation"), problem.evaluate("test"), problem.evaluate("test")]
    assert all(in_range(task.metric, value) for value in [*values, problem.chance])
    assert values[1] == values[2]
    assert problem.model.training


@each_task
def test_the_same_seed_gives_the_same_weights_and_batches(task: SuiteTask) -> None:
    one, two, other = task.build(3), task.build(3), task.build(4)
    weights, again, different = ([*problem.model.state_dict().values()] for problem in (one, two, other))
    assert all(torch.equal(a, b) for a, b in zip(weights, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(weights, different, strict=True))
    for batch, same in zip(first_batches(one, 5), first_batches(two, 5), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(batch, same, strict=True))
        assert len(batch[0]) == task.batch_size
    pairs = zip(first_batches(one, 5), first_batches(other, 6), strict=True)
    assert not all(torch.equal(a[0], b[0]) for a, b in pairs)


@each_task
def test_building_does_not_touch_the_global_generator(task: SuiteTask) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    task.build(0).evaluate("validation")
    assert torch.equal(torch.rand(3), expected)


def test_every_family_has_several_open_and_several_sealed_tasks() -> None:
    families = {task.family for task in TASKS.values()}
    assert len(families) == 14
    assert len(open_tasks()) >= 100
    assert len(sealed_tasks()) >= 30
    assert len(open_tasks()) + len(sealed_tasks()) == len(TASKS)
    for family in families:
        assert sum(task.family == family for task in open_tasks()) >= 2
        assert sum(task.family == family for task in sealed_tasks()) >= 2
