"""What is trained: the interface that the run machinery needs of a task."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from ddpnopt.lab.data import Dataset


class Evaluation(NamedTuple):
    """How well a model does on some data."""

    loss: float
    metric: float
    """For classification the accuracy in percent."""


class Task(Protocol):
    """Data, a network, a loss and a metric, and how long to train; immutable, hashable, and it can be pickled."""

    @property
    def name(self) -> str:
        """A short name for tables and progress bars."""

    @property
    def epochs(self) -> int: ...

    @property
    def batch_size(self) -> int: ...

    @property
    def identity(self) -> Mapping[str, Any]:
        """Everything that decides the computation, as JSON values: the task's part of the key of a run."""

    @property
    def untrained(self) -> Evaluation:
        """Loss and metric of a model that has learnt nothing, which a run that diverged counts as."""

    @property
    def higher_is_better(self) -> bool:
        """Whether a larger metric is a better one."""

    def load(self, seed: int, *, validation: bool = False, data_dir: Path | None = None) -> Dataset:
        """The data; with `validation` a part of the training data takes the place of the test set."""

    def build(self, data: Dataset, seed: int) -> nn.Module:
        """The network, its weights drawn from `seed`, without changing the global random state."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The training loss of a batch."""

    def evaluate(self, model: nn.Module, x: Tensor, y: Tensor) -> Evaluation:
        """Mean loss and metric over all of `x`."""
