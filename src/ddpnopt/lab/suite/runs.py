"""The suite's tasks as tasks of the run machinery: `RunConfig("adam", SuiteRunTask("vit"), 3e-3, seed=0)`.

A task goes by its name, so that a run can be sent to another process; the name is looked up where it is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddpnopt.lab.errors import ExperimentError, UnknownNameError
from ddpnopt.lab.runs.outcome import TrainingRecord
from ddpnopt.lab.runs.task import Evaluation
from ddpnopt.lab.suite.definition import definition
from ddpnopt.lab.suite.task import Batch, SplitName, SuiteProblem, SuiteTask
from ddpnopt.lab.suite.tasks import TASKS


@dataclass(frozen=True, eq=False)
class SuiteRunProblem:
    """A problem of the suite, whose batches have no end, as one epoch of `steps_per_epoch` steps."""

    problem: SuiteProblem
    steps_per_epoch: int
    split: SplitName

    @property
    def model(self) -> nn.Module:
        return self.problem.model

    @property
    def epochs(self) -> int:
        return 1

    def epoch(self, generator: torch.Generator) -> Iterator[Batch]:
        return islice(self.problem.batches(generator), self.steps_per_epoch)

    def loss(self, batch: Batch) -> Tensor:
        return self.problem.loss(batch)

    def evaluate(self, record: TrainingRecord) -> Evaluation:
        """The loss of the last steps and the task's metric on the split."""
        return Evaluation(record.final_loss, self.problem.evaluate(self.split))


@dataclass(frozen=True)
class SuiteRunTask:
    """A task of the suite by name; `steps` replaces its own number of steps."""

    name: str
    steps: int | None = None

    def __post_init__(self) -> None:
        if self.name not in TASKS:
            raise UnknownNameError("task", self.name, TASKS)
        if self.steps is not None and self.steps < 1:
            raise ExperimentError(f"steps must be at least 1, not {self.steps}")

    @property
    def task(self) -> SuiteTask:
        return TASKS[self.name]

    @property
    def length(self) -> int:
        """The number of steps of a run."""
        return self.task.steps if self.steps is None else self.steps

    @property
    def identity(self) -> Mapping[str, Any]:
        """Name, length, and a digest of the definition: an edited task makes other runs."""
        length = {"steps": self.length, "batch_size": self.task.batch_size}
        return {"suite": self.name, **length, "definition": definition(self.name)}

    @property
    def untrained(self) -> Evaluation:
        """The loss of the first batch before any step, and the task's metric of chance."""
        return _untrained(self.name)

    @property
    def higher_is_better(self) -> bool:
        return self.task.better == "higher"

    def problem(self, seed: int, *, validation: bool = False, data_dir: Path | None = None) -> SuiteRunProblem:
        """The task's problem; the suite makes its data itself and needs no `data_dir`."""
        return SuiteRunProblem(self.task.build(seed), self.length, "validation" if validation else "test")


@cache
def _untrained(name: str) -> Evaluation:
    problem = TASKS[name].build(0)
    problem.model.train()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # for losses and layers that draw
        loss = float(problem.loss(next(problem.batches(torch.Generator().manual_seed(0)))))
    return Evaluation(loss, problem.chance)
