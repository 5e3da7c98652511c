"""What is trained: the interface that the run machinery needs of a task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ddpnopt.lab.runs.outcome import TrainingRecord


class Evaluation(NamedTuple):
    """How well a model does."""

    loss: float
    """On the training data."""
    metric: float
    """On the test set or the held-out data; for classification the accuracy in percent."""


class TrainingProblem(Protocol):
    """One model to train, with its data.

    If it has an attribute `hands_loss_over` that is true, DDPNOpt is given the value of the loss with each step.
    """

    @property
    def model(self) -> nn.Module: ...

    @property
    def epochs(self) -> int:
        """How often `epoch` is called; 1 for data without end."""

    @property
    def steps_per_epoch(self) -> int: ...

    def epoch(self, generator: torch.Generator) -> Iterator[Any]:
        """The batches of one epoch, in an order drawn from `generator`."""

    def loss(self, batch: Any) -> Tensor:
        """The training loss of a batch: run the model on it."""

    def evaluate(self, record: TrainingRecord) -> Evaluation:
        """After training; not finite where the model has diverged. `record.final_loss` may serve as training loss."""


class Task(Protocol):
    """Data, a network, a loss and a metric, and how long to train; immutable, hashable, and it can be pickled."""

    @property
    def name(self) -> str:
        """A short name for tables and progress bars."""

    @property
    def identity(self) -> Mapping[str, Any]:
        """Everything that decides the computation, as JSON values: the task's part of the key of a run."""

    @property
    def untrained(self) -> Evaluation:
        """Loss and metric of a model that has learnt nothing, which a run that diverged counts as."""

    @property
    def higher_is_better(self) -> bool:
        """Whether a larger metric is a better one."""

    def problem(self, seed: int, *, validation: bool = False, data_dir: Path | None = None) -> TrainingProblem:
        """Data and weights drawn from `seed`, without changing the global random state.

        With `validation` the metric is that of held-out training data; the test set is not touched.
        """
