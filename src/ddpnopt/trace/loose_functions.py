"""Functions of torch that a parameter without a layer may be used in."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _methods(*names: str) -> set[Any]:
    """The function of the module and the method of the tensor with these names, as far as there are any."""
    found = [getattr(where, name, None) for name in names for where in (torch, Tensor, F, torch.linalg)]
    return {each for each in found if each is not None}


# which tell something about a tensor without reading it
PASSIVE: set[Any] = {
    getattr(Tensor, name).__get__
    for name in (
        "shape",
        "dtype",
        "device",
        "requires_grad",
        "ndim",
        "grad",
        "data",
        "is_leaf",
        "layout",
        "grad_fn",
        "_base",
        "is_sparse",
        "is_quantized",
        "is_cuda",
        "is_nested",
        "names",
        "is_meta",
        "is_mkldnn",
        "itemsize",
    )
    if hasattr(Tensor, name)
}
PASSIVE |= _methods("size", "dim", "numel", "stride", "is_floating_point", "is_complex", "element_size")
PASSIVE |= _methods("is_contiguous", "data_ptr", "detach", "register_hook", "untyped_storage", "is_shared")

SUMS: set[Any] = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__}
PRODUCTS: set[Any] = {torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.multiply, Tensor.multiply}
IN_PLACE: dict[Any, Any] = {Tensor.add_: torch.add, Tensor.__iadd__: torch.add}  # that need no former value

_ELEMENTWISE = _methods(
    "sub", "rsub", "div", "true_divide", "pow", "neg", "where", "maximum", "minimum", "lerp", "addcmul", "addcdiv",
    "masked_fill", "clamp", "square", "abs", "exp", "exp2", "log", "sqrt", "rsqrt", "reciprocal", "sigmoid", "tanh",
    "sin", "cos", "softplus", "relu", "silu", "gelu", "logsigmoid", "expm1", "log1p",
    "leaky_relu", "elu", "selu", "mish", "relu6", "hardswish",
) | {
    Tensor.__sub__, Tensor.__rsub__, Tensor.__truediv__, Tensor.__rtruediv__, Tensor.__pow__, Tensor.__neg__,
}  # fmt: skip

# from parameters alone: views, elementwise functions, norms
OF_PARAMETERS: set[Any] = (
    SUMS
    | PRODUCTS
    | _ELEMENTWISE
    | _methods(
        "view", "reshape", "unsqueeze", "squeeze", "transpose", "permute", "movedim", "flatten", "unflatten", "t",
        "expand", "expand_as", "broadcast_to", "repeat", "repeat_interleave", "tile", "narrow", "select", "chunk",
        "split", "unbind", "index_select", "contiguous", "to", "float", "double", "half", "bfloat16", "type_as",
        "clone", "flip", "roll", "cat", "stack", "sum", "mean", "norm", "vector_norm", "softmax", "log_softmax",
        "normalize", "matmul", "mm", "mv", "dot", "vdot", "outer", "diag", "tril", "triu", "_weight_norm", "embedding",
        "swapaxes", "view_as", "reshape_as", "adaptive_avg_pool1d", "einsum", "interpolate",
        "linear", "layer_norm", "rms_norm", "conv1d", "conv2d", "conv3d",
        "cumsum", "cumprod", "logcumsumexp", "logsumexp", "prod", "amax", "amin", "var", "std", "erf", "sinh", "cosh",
        "atan", "addmm", "addmv", "bmm", "tensordot", "kron", "trace", "diagonal", "diag_embed", "matrix_exp",
        "fake_quantize_per_tensor_affine", "fake_quantize_per_channel_affine", "fused_moving_avg_obs_fake_quant",
    )
    | {Tensor.__getitem__, Tensor.__matmul__, torch.linalg.vector_norm}
    | {getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH")}
)  # fmt: skip


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    return v * (g / torch.norm_except_dim(v, 2, dim))


def _fake_quantize(x: Tensor, scale: Tensor, zero: Tensor, least: int, most: int) -> Tensor:
    """Rounded to steps, with the gradient of no rounding where x is within them."""
    steps = torch.round(x.detach() / scale) + zero
    inside = (steps >= least) & (steps <= most)
    return (steps.clamp(least, most) - zero) * scale + (x - x.detach()) * inside


def _of_channels(x: Tensor, scale: Tensor, zero: Tensor, axis: int, least: int, most: int) -> Tensor:
    shape = [-1 if d == axis % x.dim() else 1 for d in range(x.dim())]
    return _fake_quantize(x, scale.view(shape), zero.view(shape), least, most)


def _observed(x: Tensor, watched: Tensor, on: Tensor, low: Tensor, high: Tensor, *rest: Any) -> Tensor:
    """With the steps that the observer has found in the original's own call."""
    scale, zero, _, least, most, axis, *of_rows = rest
    if not bool(on):
        return x.clone()
    if of_rows and of_rows[0]:
        return _of_channels(x, scale, zero, axis, least, most)
    return _fake_quantize(x, scale, zero, least, most)


# the same function, for torch.func, which has no rule for the original
WITH_RULES: dict[Any, Any] = {
    torch._weight_norm: _weight_norm,
    torch.fake_quantize_per_tensor_affine: _fake_quantize,
    torch.fake_quantize_per_channel_affine: _of_channels,
    torch.fused_moving_avg_obs_fake_quant: _observed,
}

# whose first argument alone may have samples
OF_FIRST: set[Any] = _methods("linear", "conv1d", "conv2d", "conv3d")

# whose input may have a row for each token of each sample
ROWS: set[Any] = {F.linear, torch.addmm, torch.matmul, Tensor.matmul, Tensor.__matmul__}

# one value for all samples becomes one for each
EXPANDING: set[Any] = _methods("expand", "expand_as", "broadcast_to", "repeat", "tile")

# that treat samples in dimension 0 one by one
MEETING: set[Any] = (
    SUMS
    | PRODUCTS
    | _ELEMENTWISE
    | _methods(
        "linear", "bilinear", "embedding", "prelu", "layer_norm", "rms_norm", "group_norm", "instance_norm", "cat",
        "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "matmul", "addmm",
        "einsum", "baddbmm", "type_as", "concat", "concatenate", "stack", "expand_as",
        "scaled_dot_product_attention",
    )
    | {Tensor.__matmul__, operator.matmul}
)  # fmt: skip

# that may have the samples in dimension 1, where dimension 0 counts the experts
STACKED: set[Any] = SUMS | PRODUCTS | _methods("bmm", "baddbmm", "matmul") | {Tensor.__matmul__, operator.matmul}

# whose dimension 1 has features, and never the samples
_OF_CHANNELS = _methods(
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "group_norm",
    "instance_norm", "baddbmm",
)  # fmt: skip

# that treat samples in dimension 1 one by one, in a model that has them there
MEETING_SECOND: set[Any] = MEETING - _OF_CHANNELS
