"""Which tensors that a loose parameter meets have samples, and where: by their number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt.trace.layer_uses import positions
from ddpnopt.trace.loose_functions import OF_FIRST, PRODUCTS, ROWS, SUMS


def is_held(t: Tensor) -> bool:
    """Whether a tensor is a parameter of a layer, or a view of one: it may have as many rows as there are samples."""
    return isinstance(t, nn.Parameter) or isinstance(t._base, nn.Parameter)


def has_samples(t: Tensor, func: Callable[..., Any], B: int) -> bool:
    """Whether a tensor has the samples in dimension 0, or rows of tokens of one sample after the other."""
    if not t.dim() or not len(t):
        return False
    if len(t) == B:
        return not positions(t)
    return func in ROWS and t.dim() == 2 and len(t) % B == 0 and t.is_floating_point()


def may_have_samples(func: Callable[..., Any], args: Any) -> Callable[[Tensor], bool]:
    """Which tensors among the arguments are no weights."""
    first = args[0] if func in OF_FIRST and args else None
    return lambda t: first is None or t is first


def draws(func: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Whether a function draws random numbers, which another call would not draw again."""
    if func is not F.scaled_dot_product_attention:
        return False
    return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))


def has_samples_behind(t: Tensor, func: Callable[..., Any], values: list[tuple[int, ...]], B: int) -> bool:
    """Whether the samples are in dimension 1, behind one that the parameters have themselves: that of experts.

    That is certain only where the parameter has nothing of its own for each place of dimension 1: the shape of the
    value computed from it is (experts, 1, …), or (experts, inputs, outputs) in a product of matrices.
    """
    if t.dim() < 2 or t.shape[1] != B or len(t) % B == 0 or not t.is_floating_point():
        return False
    matrices = func not in SUMS and func not in PRODUCTS
    return all(
        len(shape) == t.dim() and shape[0] == len(t) and (t.dim() == 3 if matrices else shape[1] == 1)
        for shape in values
    )


def samples_of_second(tensors: list[Tensor], B: int) -> int | None:
    """Which dimension has the samples in a model that has them in dimension 1, as far as it keeps them there.

    None if there are none, or if their number does not tell.
    """
    found = set()
    for t in tensors:
        least = 2 + t.is_floating_point()  # time, samples, features
        if t.dim() >= least and t.shape[1] == B:
            found.add(1 if len(t) != B else None)
        elif t.dim() and len(t) == B and not positions(t):
            found.add(0)
    return found.pop() if len(found) == 1 else None


def gives_one_to_each_second(value: Tensor, out: Tensor, B: int) -> bool:
    """The same as below, for samples in dimension 1."""
    return out.dim() == value.dim() > 1 and value.shape[1] == 1 < B == out.shape[1]


def gives_one_to_each(value: Tensor, out: Tensor, B: int) -> bool:
    """Whether one value for all samples has become one for each, or B copies of its rows, one after the other."""
    rows = len(value) if value.dim() else 0
    if not out.dim():
        return False
    new = out.dim() > value.dim()  # then dimension 0 has nothing but copies
    return (len(out) == B and (new or rows != B)) or (not new and rows > 1 and len(out) == B * rows)


def are_ids(ids: Any, B: int) -> bool:
    """Whether an index has a number, or several, for each sample."""
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
        return False
    return has_samples(ids, F.embedding, B)


def as_choice(x: Tensor, index: Any, value: Any) -> tuple[Tensor, Tensor, Tensor] | None:
    """`x[mask] = value` as the arguments of `where`, if all places of the mask get the same value."""
    if not isinstance(index, Tensor) or index.dtype != torch.bool or not isinstance(value, Tensor):
        return None
    if x.shape[: index.dim()] != index.shape or value.dim() > x.dim() - index.dim():
        return None
    return index[(..., *[None] * (x.dim() - index.dim()))], value, x.detach()
