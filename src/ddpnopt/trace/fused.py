"""Modules that apply several weights in one fused call, such as attention and recurrent layers.

Hooks see the input and the output of such a module, but not what each of its weights is applied to. While a recorded
pass or its replay runs, the fused call is therefore replaced by an equal one made of `Piece`s: linear maps with the
module's own parameters, each of which is a layer with hooks like any other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Replacement = Callable[..., Any]
"""Takes the arguments of a function of torch; NotImplemented leaves the call as it is."""


class Piece(nn.Module):
    """h = W x + b on the last dimension, with parameters of another module; it is not part of the model."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, *, recurrent: bool = False) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.recurrent = recurrent  # whether its input, (B, T, n), at time t depends on its output at t - 1
        self.span: tuple[int, int] | None = None  # of the outputs that the next call computes; None: all

    def forward(self, x: Tensor) -> Tensor:
        if self.span is None:
            return F.linear(x, self.weight, self.bias)
        start, end = self.span
        return F.linear(x, self.weight[start:end], None if self.bias is None else self.bias[start:end])

    def part(self, x: Tensor, start: int, end: int) -> Tensor:
        """Some of the outputs."""
        self.span = start, end
        try:
            found: Tensor = self(x)
            return found
        finally:
            self.span = None


class Holder(nn.Module):
    """Stands for a parameter that belongs to no layer; it is not part of the model."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


def widened(p: Tensor, span: tuple[int, int] | None, outputs: int) -> Tensor:
    """Gradients at some of the outputs of a piece as gradients at all of them."""
    return p if span is None else F.pad(p, (span[0], outputs - span[1]))


class Fused(ABC):
    """A module that makes a fused call, its pieces by name, and what the call is replaced with."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.module = name, module
        self.pieces: dict[str, nn.Module] = {}

    @abstractmethod
    def replacements(self, args: tuple[Any, ...]) -> dict[Any, Replacement]:
        """By function of torch, for a call of the module with these arguments."""

    def applies(self) -> bool:
        """Whether the module is in a state in which the fused call can be replaced."""
        return not torch.is_autocast_enabled(next(self.module.parameters()).device.type)


class Interception(TorchFunctionMode):
    """While it is entered, some functions of torch are replaced."""

    def __init__(self, replacements: dict[Any, Replacement]) -> None:
        super().__init__()
        self.replacements = replacements

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        replacement = self.replacements.get(func)
        if replacement is not None:
            found = replacement(*args, **(kwargs or {}))
            if found is not NotImplemented:
                return found
        return func(*args, **(kwargs or {}))
