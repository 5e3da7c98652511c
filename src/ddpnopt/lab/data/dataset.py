"""A data set held in tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ddpnopt.lab.errors import ExperimentError


@dataclass(frozen=True, eq=False)
class Dataset:
    """Standardised float32 inputs (N, ...) and int64 labels (N,), for training and for testing."""

    name: str
    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: int
    note: str = ""
    """A footnote every table made from this data must carry, such as lossy copies of the images."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.x_train.shape[1:])

    def subset(self, n_train: int, seed: int = 0) -> Dataset:
        """`n_train` training samples drawn without replacement; the test set stays whole."""
        available = len(self.x_train)
        if not 1 <= n_train <= available:
            raise ExperimentError(f"{self.name} has {available} training samples; cannot take {n_train} of them")
        if n_train == available:
            return self
        chosen = torch.randperm(available, generator=torch.Generator().manual_seed(seed))[:n_train]
        return replace(self, x_train=self.x_train[chosen], y_train=self.y_train[chosen])

    def split_validation(self, fraction: float = 0.2, seed: int = 0) -> Dataset:
        """The same training data with a part held out instead of the test set, which tuning must not see."""
        available = len(self.x_train)
        held_out = round(available * fraction)
        if not 1 <= held_out < available:
            raise ExperimentError(f"cannot hold out {fraction:g} of {available} training samples")
        order = torch.randperm(available, generator=torch.Generator().manual_seed(seed))
        train, held = order[held_out:], order[:held_out]
        return replace(
            self,
            x_train=self.x_train[train],
            y_train=self.y_train[train],
            x_test=self.x_train[held],
            y_test=self.y_train[held],
        )

    def batches(self, batch_size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """One epoch in a fresh order; the last batch may be smaller."""
        order = torch.randperm(len(self.x_train), generator=generator)
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            yield self.x_train[chosen], self.y_train[chosen]


def standardised(train: Tensor, test: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Both splits shifted and scaled to the training split's mean 0 and standard deviation 1 over `dims`.

    A feature that never varies in training (the corners of DIGITS) is only shifted.
    """
    mean = train.mean(dim=dims, keepdim=True)
    std = train.std(dim=dims, keepdim=True, correction=0)
    std = torch.where(std > 0, std, torch.ones_like(std))
    return (train - mean) / std, (test - mean) / std
