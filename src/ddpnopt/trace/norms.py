"""The norms of `torch.nn` as a normalisation, which has no parameters, and the scale and shift behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt.linear.elementwise import ScaleShift
from ddpnopt.trace.checkpointing import saves_as_usual


def _layer(norm: Any, x: Tensor) -> Tensor:
    return F.layer_norm(x, norm.normalized_shape, eps=norm.eps)


def _rms(norm: Any, x: Tensor) -> Tensor:
    return F.rms_norm(x, norm.normalized_shape, eps=norm.eps)


def _group(norm: Any, x: Tensor) -> Tensor:
    return F.group_norm(x, norm.num_groups, eps=norm.eps)


def _batch(norm: Any, x: Tensor) -> Tensor:
    """With the statistics of the batch, or with the running ones as they are: neither is updated here."""
    if norm.training or norm.running_mean is None:
        return F.batch_norm(x, None, None, training=True, eps=norm.eps)
    return F.batch_norm(x, norm.running_mean, norm.running_var, eps=norm.eps)


def _instance(norm: Any, x: Tensor) -> Tensor:
    """Of each channel of each sample, or with the running statistics as they are."""
    if norm.training or norm.running_mean is None:
        return F.instance_norm(x, eps=norm.eps)
    return F.instance_norm(x, norm.running_mean, norm.running_var, use_input_stats=False, eps=norm.eps)


# by the method that runs: a subclass with a forward of its own may do anything
_NORMALISATIONS: dict[Any, tuple[Callable[[Any, Tensor], Tensor], bool]] = {  # and whether dimension 1 has the weights
    nn.LayerNorm.forward: (_layer, False),
    nn.RMSNorm.forward: (_rms, False),
    nn.GroupNorm.forward: (_group, True),
    nn.modules.batchnorm._BatchNorm.forward: (_batch, True),
    nn.modules.instancenorm._InstanceNorm.forward: (_instance, True),
}


def describe_norm(module: nn.Module, weight: nn.Parameter, has_bias: bool) -> ScaleShift | None:
    """The scale and shift of a norm with this trainable weight; None for any other module."""
    found = _NORMALISATIONS.get(type(module).forward)
    return None if found is None else ScaleShift(tuple(weight.shape), has_bias, channels_first=found[1])


def normalised(module: nn.Module, x: Tensor) -> Tensor:
    """x^, the input of the scale and shift."""
    return _NORMALISATIONS[type(module).forward][0](module, x)


Statistics = tuple[Tensor, Tensor]
"""The mean and one over the deviation: of each channel, (C,), or of each place, with as many dimensions as x."""


def statistics(h: Tensor) -> Statistics | None:
    """Those by which a batch norm or a layer norm has just normalised, if autograd has saved them."""
    node: Any = h.grad_fn
    kind = type(node).__name__
    saved = kind == "NativeLayerNormBackward0" or (kind == "NativeBatchNormBackward0" and node._saved_training)
    return (node._saved_result1, node._saved_result2) if saved and saves_as_usual() else None


def normalised_by(known: Statistics, x: Tensor) -> Tensor:
    """x^ of such a norm: in less than half the time, since they need not be computed again."""
    if known[0].dim() == x.dim():
        return (x - known[0]).mul_(known[1])
    mean, scale = (each.view(-1, *[1] * (x.dim() - 2)) for each in known)
    return torch.addcmul(-mean * scale, x, scale)
