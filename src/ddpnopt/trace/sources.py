"""Nodes of autograd's graph at the outputs of layers whose weights were taken out of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Answer = Callable[[Tensor], list[Tensor | None]]


class Source(torch.autograd.Function):
    """Lets a gradient arrive at h although nothing before it needs one; h is not a leaf, so in-place operations work.

    The anchors make it a node of the graph; they get no gradient.
    """

    @staticmethod
    def forward(ctx: Any, h: Tensor, *anchors: Tensor) -> Tensor:
        ctx.mark_dirty(h)
        return h

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad
        return (grad if wanted[0] else None, *[None] * (len(wanted) - 1))


class Asked(Source):
    """A source whose anchors are weights that autograd has skipped: `answer` has their gradients if asked for."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, answer: Answer, *anchors: Tensor) -> Tensor:  # type: ignore[override]
        ctx.answer = answer
        ctx.mark_dirty(h)
        return h

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad
        found: list[Tensor | None] = [None] * (len(wanted) - 2)
        for node, _ in torch._C._current_autograd_node().next_functions[1:]:
            try:
                torch._C._will_engine_execute_node(node)  # type: ignore[arg-type]
            except RuntimeError:  # raised for a leaf that autograd.grad(…) is to return
                found = ctx.answer(grad)
                break
        return (grad if wanted[0] else None, None, *found)


def source_of(h: Tensor) -> tuple[Tensor, Tensor]:
    """h, and the tensor whose gradient is that of h even if h is overwritten.

    A linear layer on tokens returns a view of its product. An in-place operation on a view rewrites the history of its
    base, and a hook on the view itself would never be called.
    """
    base = h._base
    if base is None:
        return h, h
    if h.numel() == base.numel() and h.is_contiguous() and base.is_contiguous():
        return h, base
    copy = h.clone()
    return copy, copy
