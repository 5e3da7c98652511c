"""The gradients of the samples at a loose parameter, for its usual uses: without a graph, much faster than with one.

A use is x + u, x u, a linear layer, a table of rows, or a value for all samples, of the parameter u itself or of a part
of it: a slice, another shape, rows of a table that all samples share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ddpnopt.trace.loose_functions import PRODUCTS, SUMS

BROADCASTS: set[Any] = {Tensor.expand, Tensor.expand_as, torch.broadcast_to, Tensor.broadcast_to}
SHAPES: set[Any] = {
    getattr(where, name)
    for name in ("view", "reshape", "unsqueeze", "squeeze", "flatten")
    for where in (torch, Tensor)
    if hasattr(where, name)
}


MATMUL: set[Any] = {torch.matmul, Tensor.matmul, Tensor.__matmul__}
TRANSPOSES: set[Any] = {torch.t, Tensor.t, Tensor.T.__get__, Tensor.mT.__get__}  # type: ignore[attr-defined]
TRANSPOSED: set[Any] = {F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d}


class Value(Protocol):
    """What is known of a tensor computed from parameters alone."""

    shape: tuple[int, ...]
    parameter: Any
    func: Callable[..., Any] | None
    args: Any
    kwargs: Any
    constant: Tensor | None
    roots: set[Any]


def gradients(func: Callable[..., Any], args: Any, kwargs: Any, g: Tensor, kind: type[Any], B: int) -> Tensor | None:
    """The gradients of B samples, (B, numbers), from g at the output of a use; None for one without a rule.

    Values computed from parameters are those arguments that are a `kind`, unless they are constants.
    """
    args = [_or_constant(each, kind) for each in args]
    values = [each for each in args if isinstance(each, kind)]
    if len(values) != 1 or not _is_plain(func, args, kwargs):
        return None
    return _at_parameter(values[0], _at_value(func, args, values[0], g, B), kind, B)


def _at_parameter(value: Any, at: Tensor | None, kind: type[Any], B: int) -> Tensor | None:
    """From the gradients at a value to those at the parameter that it is a part of."""
    while at is not None and value.parameter is None:
        inner: Any = value.args[1 if value.func is F.embedding else 0]
        if not isinstance(inner, kind) or not _is_plain(value.func, value.args, value.kwargs):
            return None
        at, value = _through(value, [_or_constant(each, kind) for each in value.args], inner, at, B), inner
    return None if at is None else at.reshape(B, -1)


def _or_constant(argument: Any, kind: type[Any]) -> Any:
    """A constant of the model as the tensor that it is."""
    constant = argument.constant if isinstance(argument, kind) else None
    return argument if constant is None else constant


def of_linear(args: Any, g: Tensor, kind: type[Any], B: int) -> dict[Any, Tensor] | None:
    """The gradients at weight and bias of a linear layer of B samples, by parameter; None without a rule."""
    if len(args) != 3 or not isinstance(args[0], Tensor) or args[0].dim() < 2 or len(args[0]) % B:
        return None
    if not all(isinstance(each, kind) and len(each.roots) == 1 for each in args[1:]):
        return None
    weight, bias = args[1:]
    rows = g.reshape(B, -1, g.shape[-1])
    found = (
        _at_parameter(weight, _at_value(F.linear, args, weight, g, B), kind, B),
        _at_parameter(bias, rows.sum(1), kind, B),
    )
    if found[0] is None or found[1] is None or weight.roots == bias.roots:
        return None
    return {next(iter(weight.roots)): found[0], next(iter(bias.roots)): found[1]}


def of_transposed_convolution(args: Any, g: Tensor, kind: type[Any], B: int) -> dict[Any, Tensor] | None:
    """The gradients at weight and bias of a transposed convolution of B samples, by parameter; None without a rule.

    One convolution in which every sample is a group of its own has them all.
    """
    if len(args) != 8 or args[6] != 1 or not all(isinstance(args[k], tuple) for k in (3, 4, 5, 7)):
        return None
    x, weight, bias, stride, padding, output_padding, _, dilation = args
    values = [each for each in (weight, bias) if each is not None]
    if not all(isinstance(each, kind) and each.parameter is not None for each in values) or len(x) != B or len(g) != B:
        return None
    C, O, *kernel = weight.shape
    found = torch.ops.aten.convolution_backward(
        g.reshape(1, B * O, *g.shape[2:]), x.reshape(1, B * C, *x.shape[2:]),
        g.new_empty(1).expand(B * C, O, *kernel), None, stride, padding, dilation, True, output_padding, B,
        [False, True, False],
    )  # fmt: skip
    gradients = {weight.parameter: found[1].reshape(B, -1)}
    if bias is not None:
        gradients[bias.parameter] = g.flatten(2).sum(2)
    return gradients


def _at_value(func: Callable[..., Any], args: Any, value: Value, g: Tensor, B: int) -> Tensor | None:
    """The gradients of the samples at a value that meets them, (B, numbers)."""
    if func in SUMS or func in PRODUCTS:
        if len(args) != 2 or len(g) != B:
            return None
        return _summed(g if func in SUMS else g * args[1 if args[0] is value else 0], value.shape)
    if func in BROADCASTS:
        return _summed(g, value.shape) if args[0] is value and len(g) == B else None
    if func is F.linear and args[1] is value and args[0].dim() > 1:
        x, rows = args[0].reshape(B, -1, args[0].shape[-1]), g.reshape(B, -1, g.shape[-1])
        return torch.bmm(rows.mT, x)
    if func in MATMUL and args[1] is value and args[0].dim() > 1 and len(value.shape) == 2 and len(args[0]) % B == 0:
        x, rows = args[0].reshape(B, -1, args[0].shape[-1]), g.reshape(B, -1, g.shape[-1])
        return torch.bmm(x.mT, rows)
    if func is F.embedding and args[1] is value and len(args[0]) == B:
        first = torch.arange(B, device=g.device).mul_(value.shape[0])
        ids = (args[0].reshape(B, -1) + first[:, None]).flatten()
        return g.new_zeros(B * value.shape[0], g.shape[-1]).index_add_(0, ids, g.reshape(-1, g.shape[-1]))
    return None


def _summed(g: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """Over what a value of this shape was broadcast to, within each sample."""
    over = g.dim() - len(shape)  # dimensions that the value has not
    if over < 0 or (over == 0 and shape[:1] != (1,)):  # a row for each place in dimension 0, which are no samples
        return None
    dims = [d for d in range(1, g.dim()) if d < over or (shape[d - over] == 1 and g.shape[d] > 1)]
    return g.sum(dims) if dims else g


def _through(value: Value, args: Any, inner: Value, at: Tensor, B: int) -> Tensor | None:
    """From the gradients at a value, (B, numbers), to those at the one that it is a part of."""
    func = value.func
    if func is F.embedding:
        rows = at.reshape(B, -1, inner.shape[-1])
        return at.new_zeros(B, *inner.shape).index_add_(1, args[0].flatten(), rows)
    if func is Tensor.__getitem__:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        if all(each is None or each is Ellipsis or type(each) in (slice, int) for each in index):
            found = at.new_zeros(B, *inner.shape)
            found[(slice(None), *index)] = at.reshape(B, *value.shape)
            return found
    if func in TRANSPOSES and len(inner.shape) == 2:
        return at.reshape(B, *value.shape).mT
    return at if func in SHAPES else None


def _is_plain(func: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Whether a function has no options, such as a row of a table that gets no gradient."""
    if func is not F.embedding:
        return not kwargs
    options = [*args[2:], *kwargs.values()]  # padding_idx, max_norm, norm_type and switches, in this order
    return all(each is None for each in options[:2]) and not any(options[3:])
