"""Recorded gradients on the scale of the loss that the step is to reduce.

A `GradScaler` and `clip_grad_norm_` change `.grad` between the backward pass and the step, but the step uses the
gradients recorded by the hooks: a factor applied to the former must be applied to the latter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ddpnopt._distributed import Together
from ddpnopt.errors import StepError
from ddpnopt.linear.given import Given
from ddpnopt.linear.layer import Parts, inner, norm
from ddpnopt.trace.gradient_hooks import on_gradient
from ddpnopt.trace.recording import LayerRecord, Recording

TRACE = 2.0**-100  # left in `.grad`, far below any gradient: `unscale_` divides it by the scale, a power of two

Average = Callable[[Parts], Parts]
"""How `.grad` was averaged over processes, by `DistributedDataParallel`, since it was computed here."""


def scaler_factor(optimizer: Any, *, weight_grads: bool) -> float | None:
    """The factor that removes the loss scale, 1 without a scaler; None if the scaler has found an overflow.

    `GradScaler.step` sets the attributes `grad_scale` and `found_inf` for the duration of `optimizer.step`.
    """
    found_inf = getattr(optimizer, "found_inf", None)
    if found_inf is None:
        return 1.0
    if not isinstance(found_inf, Tensor):  # a sum over no gradients
        raise StepError(
            "GradScaler found no .grad to check for overflow: run the forward pass under torch.autocast, or create "
            "the optimizer with weight_grads=True, or use no scaler (bfloat16 and float32 need none)."
        )
    if bool(found_inf):
        return None
    scale = optimizer.grad_scale
    if scale is not None:
        return 1.0 / float(scale)
    if not weight_grads:
        raise StepError(
            "scaler.unscale_() changes .grad only, and this optimizer fills it for all layers only with "
            "weight_grads=True: set it where gradients are unscaled or clipped before scaler.step()."
        )
    return 1.0  # already removed from .grad; `follow` finds the factor there


def mark_overflow(record: LayerRecord, grad: Tensor | None) -> None:
    """Leave in `.grad` of the smallest parameter, where a GradScaler looks, a trace or (after an overflow) a NaN."""
    if grad is None:
        return
    p = min(record.parameters, key=lambda p: p.numel())
    mark = (grad.detach().sum(dtype=torch.float32) * 0).to(p.dtype)
    with torch.no_grad():
        p.grad = torch.full_like(p, TRACE) + mark if p.grad is None else p.grad + mark


def traced_factor(parameters: Iterable[nn.Parameter]) -> float | None:
    """What `scaler.unscale_` has multiplied `.grad` by, from the trace in it; None without a trace."""
    for p in parameters:
        if p.grad is None or not p.grad.numel():
            continue
        least, most = (float(a) for a in p.grad.aminmax())
        if 0 < least == most < TRACE:
            return least / TRACE
    return None


def watch_overflow(record: LayerRecord, h: Tensor) -> None:
    on_gradient(h, partial(mark_overflow, record))


def scale(recording: Recording, factor: float) -> None:
    """Replace the recorded gradients by those of `factor` times the loss."""
    for part in recording.parts or [recording]:
        part.q = [None if q is None else q.to(_wide(q)) * factor for q in part.q]
    if recording.parts:
        recording.q = [None if q is None else q.to(_wide(q)) * factor for q in recording.q]
    if recording.loose is not None:
        recording.loose.scale(factor)
    for record in recording.layers:
        dtype = record.parameters[0].dtype  # a half-precision gradient may underflow without its scale
        record.p_h = None if record.p_h is None else record.p_h.to(dtype) * factor
        record.p_x = None if record.p_x is None else record.p_x.to(dtype) * factor
        record.p_h_dot_h = None if record.p_h_dot_h is None else record.p_h_dot_h * factor
        record.shared = None if record.shared is None else record.shared * factor
        if record.noted is not None:
            record.noted.scale(factor)


def _wide(q: Tensor) -> torch.dtype:
    return torch.float32 if q.dtype.itemsize < 4 else q.dtype


def own_gradient(record: LayerRecord) -> Parts:
    """The part of `.grad` that came through the layer's output."""
    assert record.p_h is not None
    dtype = record.parameters[0].dtype
    return record.layer.grad(record.input_in(dtype), record.p_h.to(dtype))


def rounding(record: LayerRecord) -> float:
    """How far autograd's gradient and ours may differ, relative to their size."""
    dtype = record.parameters[0].dtype
    narrow = record.p_h.dtype if record.p_h is not None else dtype
    return 1e3 * torch.finfo(dtype).eps if narrow == dtype else 4 * torch.finfo(narrow).eps


def _factor_of_grads(recording: Recording, average: Average) -> float | None:
    """The one factor between `.grad` and the recorded gradients of all layers; None if there is no such factor."""
    factors = []
    for record in recording.layers:
        grads = [p.grad for p in record.parameters]
        if any(g is None for g in grads):
            return None
        given, own = [g for g in grads if g is not None], average(own_gradient(record))
        size = norm(own)
        if size == 0:
            continue
        factor = float(inner(given, own)) / size**2
        apart = norm([g - factor * o for g, o in zip(given, own, strict=True)])
        if apart > rounding(record) * abs(factor) * size:
            return None
        factors.append((factor, rounding(record)))
    if not factors:
        return 1.0
    first, tolerance = factors[0]
    if abs(first - 1) <= tolerance:
        first = 1.0  # .grad is unchanged
    return first if all(abs(factor - first) <= some * abs(first) for factor, some in factors) else None


def follow(recording: Recording, average: Average, *, unscaled: bool) -> float | None:
    """Where `.grad` was unscaled or clipped since the backward pass, scale the recorded gradients alike.

    Returns by which factor it was clipped, None if that cannot be separated from the scale of a GradScaler.
    """
    factor = _factor_of_grads(recording, average)
    if factor is not None and factor != 1.0:
        scale(recording, factor)
    elif factor is None and unscaled:
        raise StepError(
            "scaler.unscale_() was called, but .grad is no longer a multiple of the gradients of the layers, so the "
            "loss scale is unknown: clip by the norm of all gradients (clip_grad_norm_), and set weight_decay instead "
            "of a penalty in the loss."
        )
    if factor is None or factor <= 0:
        return 1.0
    if not unscaled:
        return factor
    power = math.log2(factor)  # a scaler's own factor is a power of two
    return 1.0 if abs(power - round(power)) < 1e-3 else None


def penalty(record: LayerRecord, average: Average = list) -> Parts | None:
    """The gradient that a penalty on the weights, or another use of them, adds to `.grad`: part of l_u."""
    parameters = record.parameters
    if all(p.grad is None for p in parameters):
        return None
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    if record.skipped:  # autograd has not computed the layer's own part, so all of it is something else
        return grads if norm(grads) > 0 else None
    own = average(own_gradient(record))
    other = [g - o for g, o in zip(grads, own, strict=True)]
    return other if _size(other) > rounding(record) * _size(own) else None


def _size(parts: Parts) -> float:
    """The norm, in one operation where there is one part: many layers are looked at in each step."""
    return float(torch.linalg.vector_norm(parts[0])) if len(parts) == 1 else norm(parts)


def find_penalties(layers: list[LayerRecord], average: Average, peers: Together | None, share: float) -> None:
    """Keep the gradient of a penalty with each record; `share` is that of this process in the batch loss."""
    for record in layers:
        if any(p.grad is not None for p in record.parameters):
            record.extra = penalty(record, average)
        if peers is not None and peers.extra:
            extra = record.extra or [p.new_zeros(p.shape) for p in record.parameters]
            record.extra = peers.sum([e * share for e in extra])


def share_among_samples(layers: list[LayerRecord], is_penalty: Callable[[Parts, list[nn.Parameter]], bool]) -> None:
    """A term of the loss in a loose parameter alone, such as a log-determinant, as an equal part of each sample's loss.

    It pulls on the parameter without holding it, unlike a penalty on its size: it is no stage cost.
    """
    for record in layers:
        if record.extra is None or record.p_h is None or not isinstance(record.layer, Given):
            continue
        if not is_penalty(record.extra, record.parameters):
            (extra,), record.extra = record.extra, None
            record.shared = extra.reshape(1, -1) / len(record.p_h)
    add_shared(layers)


def add_shared(layers: list[LayerRecord]) -> None:
    """Add what all samples share to their gradients, which come from the outputs alone."""
    for record in layers:
        if record.shared is not None and record.p_h is not None:
            record.p_h = record.p_h + record.shared
