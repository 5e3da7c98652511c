"""Training and evaluation mode: a step runs the model in that of the pass it follows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import nn


def in_mode(model: nn.Module, training: bool) -> AbstractContextManager[None]:
    """The model in this mode, and each of its modules in its own afterwards."""
    return nullcontext() if model.training == training else _switched(model, training)


@contextmanager
def _switched(model: nn.Module, training: bool) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
