"""Training and evaluation mode: a step runs each module in that of the pass it follows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

Modes = tuple[bool, ...]
"""Of each module, whether it is in training mode."""


class Switch:
    """Puts the modules of a model into the modes of a pass. Their own `train` may do more: it is not called."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.modules())

    def now(self) -> Modes:
        return tuple([module.training for module in self._modules])

    def to(self, modes: Modes) -> None:
        for module, training in zip(self._modules, modes, strict=True):
            module.training = training

    @contextmanager
    def kept(self, modes: Modes | None = None) -> Iterator[None]:
        """The modes of a pass inside, if any, and those of before afterwards."""
        before = self.now()
        if modes is not None and modes != before:
            self.to(modes)
        try:
            yield
        finally:
            if self.now() != before:
                self.to(before)


@contextmanager
def norms_in_eval(model: nn.Module) -> Iterator[None]:
    """Batch norms couple the samples: here they use their running statistics."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training]
    for norm in norms:
        norm.training = norm.running_mean is None
    try:
        yield
    finally:
        for norm in norms:
            norm.training = True
