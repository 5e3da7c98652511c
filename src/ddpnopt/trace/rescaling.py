"""A loss that was scaled: by a `GradScaler`, or by clipping between backward pass and step.

The scaler and `clip_grad_norm_` change `.grad`, but a step is made of what the hooks have captured: whatever factor has
been put on the one must be put on the other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ddpnopt.ddp.sweep import norm
from ddpnopt.ddp.value.base import inner
from ddpnopt.errors import StepError
from ddpnopt.trace.recording import Recording, Stage, when_gradient_comes

Average = Callable[[list[Tensor]], list[Tensor]]
"""What has been done to `.grad` since it was computed here: `DistributedDataParallel` averages it over processes."""


def scaler_factor(optimizer: Any, *, weight_grads: bool) -> float | None:
    """What takes the loss scale off, 1 without a scaler; None if the scaler has found an overflow.

    `GradScaler.step` hands both over as attributes, `grad_scale` and `found_inf`, for the time of `optimizer.step`.
    """
    found_inf = getattr(optimizer, "found_inf", None)
    if found_inf is None:
        return 1.0
    if not isinstance(found_inf, Tensor):  # a sum over no gradients
        raise StepError(
            "GradScaler found no .grad to look for overflows in: run the forward pass under torch.autocast, or build "
            "the optimizer with weight_grads=True, or do without a scaler (bfloat16 and float32 need none)."
        )
    if bool(found_inf):
        return None
    scale = optimizer.grad_scale
    if scale is not None:
        return 1.0 / float(scale)
    if not weight_grads:
        raise StepError(
            "scaler.unscale_() has changed .grad only, which this optimizer fills with the gradients of the layers if "
            "built with weight_grads=True: do so where gradients are unscaled or clipped before scaler.step()."
        )
    return 1.0  # on .grad already; `followed` finds it there


def mark_overflow(stage: Stage, grad: Tensor) -> None:
    """Leave in `.grad`, where a GradScaler looks, a zero or (after an overflow) a NaN, on the smallest parameter."""
    p = min(stage.unit.parameters, key=lambda p: p.numel())
    mark = (grad.sum(dtype=torch.float32) * 0).to(p.dtype)
    with torch.no_grad():
        p.grad = torch.zeros_like(p) + mark if p.grad is None else p.grad + mark


def watch_overflow(stage: Stage, h: Tensor) -> None:
    when_gradient_comes(h, partial(mark_overflow, stage))


def scale(recording: Recording, factor: float) -> None:
    """The slopes of `factor` times the loss."""
    for part in recording.parts or [recording]:
        part.q = [None if q is None else q.to(_wide(q)) * factor for q in part.q]
    if recording.parts:
        recording.q = [None if q is None else q.to(_wide(q)) * factor for q in recording.q]
    for stage in recording.stages:
        dtype = stage.unit.parameters[0].dtype  # a half-precision slope may be too small without its scale
        stage.p_h = None if stage.p_h is None else stage.p_h.to(dtype) * factor
        stage.p_x = None if stage.p_x is None else stage.p_x.to(dtype) * factor
        stage.p_h_dot_h = None if stage.p_h_dot_h is None else stage.p_h_dot_h * factor


def _wide(q: Tensor) -> torch.dtype:
    return torch.float32 if q.dtype.itemsize < 4 else q.dtype


def own_gradient(stage: Stage) -> list[Tensor]:
    """The part of `.grad` that has come through the layer's output."""
    assert stage.p_h is not None
    dtype = stage.unit.parameters[0].dtype
    return stage.layer.grad(stage.x.to(dtype), stage.p_h.to(dtype))


def rounding(stage: Stage) -> float:
    """How far autograd's gradient and ours may differ, relative to their size."""
    dtype = stage.unit.parameters[0].dtype
    narrow = stage.p_h.dtype if stage.p_h is not None else dtype
    return 1e3 * torch.finfo(dtype).eps if narrow == dtype else 4 * torch.finfo(narrow).eps


def followed(recording: Recording, average: Average) -> float | None:
    """The one factor between `.grad` and the captured slopes of all layers; None if there is no such factor."""
    factors = []
    for stage in recording.stages:
        grads = [p.grad for p in stage.unit.parameters]
        if any(g is None for g in grads):
            return None
        given, own = [g for g in grads if g is not None], average(own_gradient(stage))
        size = norm(own)
        if size == 0:
            continue
        factor = float(inner(given, own)) / size**2
        apart = norm([g - factor * o for g, o in zip(given, own, strict=True)])
        if apart > rounding(stage) * abs(factor) * size:
            return None
        factors.append((factor, rounding(stage)))
    if not factors:
        return 1.0
    first, tolerance = factors[0]
    if abs(first - 1) <= tolerance:
        first = 1.0  # nothing was done to .grad
    return first if all(abs(factor - first) <= some * abs(first) for factor, some in factors) else None
