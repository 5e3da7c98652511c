"""Hooks of our own on gradients in autograd's graph: there is one for each layer in each pass."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor


class _Lender(threading.local):
    """A tensor of each thread whose hooks are given to nodes of a graph, so that the user's tensors show none."""

    def __init__(self) -> None:
        self.tensor = torch.empty(0)


_lender = _Lender()


Arrived = Callable[[Tensor | None], None]
"""Called with a gradient, which may have a graph of its own; None where there is none."""


def on_gradient(tensor: Tensor, call: Arrived) -> None:
    """Call at the gradient of a tensor that is not a leaf: `register_hook` in a fraction of the time.

    Also where `autograd.grad` is asked for that gradient, and ends with it.
    """
    node, lender = tensor.grad_fn, _lender.tensor
    assert node is not None
    if tensor.output_nr:
        node.register_prehook(partial(_pass_gradient, call, tensor.output_nr))
        return
    lender._backward_hooks = {0: call}
    node._register_hook_dict(lender)
    lender._backward_hooks = None


def _pass_gradient(call: Arrived, index: int, grads: tuple[Tensor | None, ...]) -> None:
    call(grads[index])
