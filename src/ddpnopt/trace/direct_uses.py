"""Weights of layers that the model also reads itself, past the layer's forward.

A head tied by hand, `h @ self.words.weight.T`, or a convolution that is never called but lends its weight to a
function: the hooks at the layer do not see such a use. What it adds to the gradient would count as a penalty on the
weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ddpnopt.trace.loose_functions import PASSIVE
from ddpnopt.trace.loose_values import tensors
from ddpnopt.trace.model_layers import ModelLayer


class DirectUses(TorchFunctionMode):
    """While it is entered: which of some layers have a use that is not made by their own module."""

    def __init__(self, layers: Iterable[ModelLayer]) -> None:
        super().__init__()
        self.found: set[ModelLayer] = set()
        self._of = {id(p): layer for layer in layers for p in layer.parameters}
        self._running: set[nn.Module] = set()

    def __enter__(self) -> DirectUses:
        self._handles = []
        for module in {layer.module for layer in self._of.values()}:
            self._handles.append(module.register_forward_pre_hook(self._begin))
            self._handles.append(module.register_forward_hook(self._end, always_call=True))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *failed: Any) -> None:
        super().__exit__(*failed)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()

    def _begin(self, module: nn.Module, _: Any) -> None:
        self._running.add(module)

    def _end(self, module: nn.Module, *_: Any) -> None:
        self._running.discard(module)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in PASSIVE and torch.is_grad_enabled():
            read = {self._of[id(t)] for t in tensors((args, kwargs)) if id(t) in self._of}
            self.found |= {layer for layer in read if layer.module not in self._running}
        return func(*args, **kwargs)
