"""One hook of a capture on a module: what torch calls, and what copies and pickles of the model leave behind."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_dynamo_compiling

from ddpnopt.trace.fused import Fused
from ddpnopt.trace.model_layers import ModelLayer

if TYPE_CHECKING:
    from ddpnopt.trace.hooks import Capture


_watching = torch._C._len_torch_function_stack


class Hook:
    """A hook that is not copied or pickled with the model, and that ends with its capture."""

    def __init__(self, capture: Capture, method: str, model_layer: ModelLayer | Fused | None) -> None:
        self.capture, self.call, self.model_layer = weakref.ref(capture), getattr(type(capture), method), model_layer
        self.at_layer = isinstance(model_layer, ModelLayer)

    def __call__(self, *args: Any) -> Any:
        if is_dynamo_compiling():
            return self._between_graphs(*args)
        capture = self.capture()
        if capture is None:
            return None
        if self.at_layer and _watching():  # what watches the model's functions, not ours
            with torch._C.DisableTorchFunction():
                return self.call(capture, self.model_layer, *args)
        return self.call(capture, self.model_layer, *args)

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _between_graphs(self, *args: Any) -> Any:
        """Keep torch.compile from tracing the hook; this costs some microseconds, so only there."""
        capture = self.capture()
        if capture is None or isinstance(self.model_layer, Fused):
            return None  # a compiled graph calls fused functions that cannot be replaced
        capture.compiled = True
        if isinstance(self.model_layer, ModelLayer):
            self.model_layer.compiled = True
        try:
            return self(*args)
        finally:
            capture.compiled = False

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return _nothing

    def __reduce__(self) -> Any:
        return _no_hook, ()


def _nothing(*args: Any) -> None:
    return None


def _no_hook() -> Callable[..., None]:
    return _nothing
