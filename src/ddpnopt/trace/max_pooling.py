"""Max pooling for a forward pass without a backward pass.

torch's kernel for images on the CPU also finds the position of each maximum, which makes it up to ten times slower than
the maximum of shifted views, with the same result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

POOLINGS = (F.max_pool2d, torch.max_pool2d)


class PlainMaxPooling(TorchFunctionMode):
    """While it is entered, 2-d max pooling takes the plain maximum where that is the same."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in POOLINGS:
            found = _pooled(*args, **(kwargs or {}))
            if found is not None:
                return found
        return func(*args, **(kwargs or {}))


def _pooled(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor | None:
    size, pad, gap = _pair(kernel_size), _pair(padding), _pair(dilation)
    step = _pair(stride) if stride not in (None, [], ()) else size
    rows_of_pixels = input.is_contiguous() and input.device.type == "cpu"  # with channels last torch's kernel is fast
    usual = pad == (0, 0) and gap == (1, 1) and min(size) > 0 and min(step) > 0 and not (ceil_mode or return_indices)
    if not (rows_of_pixels and usual and input.dim() in (3, 4)) or max(size) > 3:
        return None
    if input.numel() == 0 or any(n < k for n, k in zip(input.shape[-2:], size, strict=True)):
        return None  # torch raises the error
    return _along(_along(input, -2, size[0], step[0]), -1, size[1], step[1])


def _along(x: Tensor, dim: int, size: int, step: int) -> Tensor:
    """The maximum of `size` neighbours, every `step`, in one dimension."""
    places = (x.shape[dim] - size) // step + 1
    shifted = (x.narrow(dim, k, (places - 1) * step + 1) for k in range(size))
    return reduce(torch.maximum, [s[..., ::step] if dim == -1 else s[..., ::step, :] for s in shifted])


def _pair(value: Any) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    return (value[0], value[-1])
