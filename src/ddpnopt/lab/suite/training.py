"""One run of a task: an ordinary training loop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from ddpnopt.lab.suite.task import SplitName, SuiteProblem, SuiteTask

MakeOptimizer = Callable[[nn.Module], Optimizer]

# The final training loss is the mean over this share of the steps, the last ones.
FINAL_SHARE = 0.1


@dataclass(frozen=True)
class SuiteOutcome:
    """What a run came to. `failure` is empty, or says why the run ended early; its metrics are then those of chance."""

    task: str
    seed: int
    losses: list[float]
    validation: float
    test: float
    chance: float
    seconds: float
    cpu_seconds: float
    failure: str = ""

    @property
    def diverged(self) -> bool:
        """Whether a loss, a metric or the optimizer failed."""
        return bool(self.failure)

    @property
    def seconds_per_step(self) -> float:
        """Wall-clock time per step, evaluation not included."""
        return self.seconds / max(len(self.losses), 1)

    @property
    def final_loss(self) -> float:
        """Mean training loss over the last tenth of the steps."""
        last = self.losses[-max(1, int(FINAL_SHARE * len(self.losses))) :]
        return sum(last) / len(last) if last else math.nan


def train(task: SuiteTask, make_optimizer: MakeOptimizer, seed: int, steps: int | None = None) -> SuiteOutcome:
    """Train from `seed` (weights, batches, noise in the loss) and measure at the end.

    An exception in the loop ends the run and is recorded: one method's failure must not stop a comparison.
    """
    problem = task.build(seed)
    losses: list[float] = []
    failure = ""
    validation = test = problem.chance
    started, cpu_started = time.perf_counter(), time.process_time()
    ended, cpu_ended = started, cpu_started
    try:
        optimizer = make_optimizer(problem.model)
        failure = _run(problem, optimizer, seed, task.steps if steps is None else steps, losses)
        ended, cpu_ended = time.perf_counter(), time.process_time()
        if not failure:
            measured = _measure(problem, optimizer)
            if all(math.isfinite(value) for value in measured):
                validation, test = measured
            else:
                failure = "the metric is not finite"
    except Exception as error:
        ended, cpu_ended = time.perf_counter(), time.process_time()
        failure = f"{type(error).__name__}: {error}"
    return SuiteOutcome(
        task.name, seed, losses, validation, test, problem.chance, ended - started, cpu_ended - cpu_started, failure
    )


def _run(problem: SuiteProblem, optimizer: Optimizer, seed: int, steps: int, losses: list[float]) -> str:
    """The loop; returns why it ended early, if it did."""
    torch.manual_seed(seed)
    batches = problem.batches(torch.Generator().manual_seed(seed))
    problem.model.train()
    _switch(optimizer, "train")
    for _ in range(steps):
        batch = next(batches)
        optimizer.zero_grad()
        loss = problem.loss(batch)
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            return f"the loss is {losses[-1]} at step {len(losses)}"
        loss.backward()
        optimizer.step()
    return ""


def _measure(problem: SuiteProblem, optimizer: Optimizer) -> tuple[float, float]:
    """Validation and test metric, with the averaged weights of optimizers that keep them."""
    splits: tuple[SplitName, SplitName] = ("validation", "test")
    _switch(optimizer, "eval")
    try:
        validation, test = (problem.evaluate(split) for split in splits)
    finally:
        _switch(optimizer, "train")
    return validation, test


def _switch(optimizer: Optimizer, mode: str) -> None:
    """Schedule-free methods and DDPNOpt have `train` and `eval`; most optimizers do not."""
    switch = getattr(optimizer, mode, None)
    if callable(switch):
        switch()
