"""From a hidden layer back to the image (Zeiler and Fergus 2014): unpool by the recorded switches, ReLU, transposed
filters."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddpnopt.errors import ModelError

Undo = Callable[[Tensor], Tensor]


@torch.no_grad()
def project_back(model: nn.Sequential, layer: nn.Module, image: Tensor, direction: Tensor) -> Tensor:
    """`direction`, of the shape of the input of `layer` for `image` (1, …), as an image."""
    undo: list[Undo] = []
    x = image
    for module in model:
        if module is layer:
            break
        back, x = _through(module, x)
        undo.append(back)
    else:
        raise ModelError("project_back: the layer is not one of the model's modules.")
    y = direction.reshape(x.shape)
    for back in reversed(undo):
        y = back(y)
    return y


def _through(module: nn.Module, x: Tensor) -> tuple[Undo, Tensor]:
    """The module's output for x, and the matching function backwards."""
    shape = x.shape
    if isinstance(module, nn.MaxPool2d):
        size, stride, padding = (_pair(each) for each in (module.kernel_size, module.stride, module.padding))
        out, switches = F.max_pool2d(x, size, stride, padding, return_indices=True)
        return lambda y: F.max_unpool2d(y, switches, size, stride, padding, list(shape)), out
    out = module(x)
    if isinstance(module, nn.Conv2d) and not isinstance(module.padding, str):
        padding = _pair(module.padding)
        return lambda y: F.conv_transpose2d(y, module.weight, None, module.stride, padding), out
    if isinstance(module, nn.Linear):
        return lambda y: y @ module.weight, out
    if isinstance(module, nn.ReLU):
        return torch.relu, out
    if isinstance(module, nn.Flatten):
        return lambda y: y.reshape(shape), out
    raise ModelError(f"project_back knows no way back through {type(module).__name__}.")


def _pair(value: int | tuple[int, ...]) -> tuple[int, ...]:
    return (value, value) if isinstance(value, int) else value
