"""The loss as a sum of terms, each of them zero at best, with the samples that they belong to.

Where the loss contains derivatives, it is no function of the outputs alone, and the gradient at the outputs does not
tell the loss of each sample. But autograd's graph does: from the root down to the first squares (or other known
elementwise losses) everything is linear, and each square has saved its argument, the residual of one sample. They are
read before the backward pass frees them: while a derivative waits to become part of a loss, and only then,
`torch.autograd.backward` looks at the graph of the scalar it is called on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch
import torch.nn.functional as F
from torch import Tensor

from ddpnopt.trace.recording import Recording

MARK = "ddpnopt_recording"  # in the metadata of the node that an output of the model comes from
Node = Any
Row = tuple[Recording, int | None]
"""The recording that a residual is computed from, and its sample that the first row belongs to; None: to all."""

_LINEAR = {
    f"{name}Backward{k}"
    for name in (
        "Add", "Sub", "Neg", "Mean", "Sum", "View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Select",
        "Slice", "Stack", "Cat", "Expand", "T", "Transpose", "Permute", "Clone", "Alias", "ToCopy",
    )
    for k in range(3)
}  # fmt: skip
_ALIASES = {"ViewBackward0", "CloneBackward0"}  # of the outputs
_PRODUCTS = {"MulBackward0", "DivBackward0"}  # linear if only one factor has a gradient


class NotATermError(Exception):
    """A part of the loss that is no sum of known terms."""


@dataclass(eq=False)
class Term:
    """Losses (n, k), k of each row, and the samples they belong to: those of one recording, or of several at once."""

    losses: Tensor
    rows: list[Row]
    node: Node
    parts: list[int]  # of the backward pass that has the gradient of each column (`trace.parts`)


def terms_of(root: Tensor, scale: float = 1.0) -> tuple[list[Term], list[Node]]:
    """The terms of a scalar, and the nodes that no recorded pass is below, such as penalties on the weights."""
    found: list[Term] = []
    strays: list[Node] = []
    with torch.no_grad():
        todo: list[tuple[Node, int, Tensor]] = [(root.grad_fn, root.output_nr, torch.full_like(root, scale))]
        while todo:
            node, index, g = todo.pop()
            if node is None:
                continue
            if recording_of(node) is not None:
                raise NotATermError("an output itself, which has no minimum")
            losses = _losses(node, g)
            if losses is not None:
                rows = _rows(node)
                if rows:
                    losses = _by_row(losses, rows)
                    found.append(Term(losses, rows, node, [0] * losses.shape[1]))
                else:
                    strays.append(node)
                continue
            name = node.name()
            live = [(each, k) for each, k in node.next_functions if each is not None]
            if index or not (name in _LINEAR or (name in _PRODUCTS and len(live) == 1)):
                if _rows(node, at_node=True):
                    raise NotATermError(name)
                strays.append(node)
                continue
            grads = node(g)
            grads = grads if isinstance(grads, tuple) else (grads,)
            for (below, k), grad in zip(node.next_functions, grads, strict=True):
                if below is not None and grad is not None:
                    todo.append(
                        (below, k, grad.sum_to_size(below._input_metadata[k].shape))
                    )  # as autograd's engine does
    return found, strays


def _losses(node: Node, g: Tensor) -> Tensor | None:
    """The elements of a known loss, times their factor in the root; None if the node is none."""
    name = node.name()
    if (name == "PowBackward0" and node._saved_exponent == 2) or (
        name == "MulBackward0" and len(node.next_functions) == 2 and _same(*node.next_functions)
    ):
        found = node._saved_self.detach().square()
    elif name == "AbsBackward0":
        found = node._saved_self.detach().abs()
    elif name in _FUNCTIONS:
        found = _FUNCTIONS[name](node)
        if node._saved_reduction == 1:
            g = g / max(1, found.numel())
    else:
        return None
    losses = g * found
    if bool((losses < 0).any()):
        raise NotATermError(name)
    return losses


def _same(a: tuple[Node, int], b: tuple[Node, int]) -> bool:
    return a[0] is not None and a[0] is b[0] and a[1] == b[1]


def _with_targets(loss: Callable[..., Tensor], node: Node, **options: Any) -> Tensor:
    return loss(node._saved_self.detach(), node._saved_target.detach(), reduction="none", **options)


_FUNCTIONS: dict[str, Callable[[Node], Tensor]] = {
    "MseLossBackward0": partial(_with_targets, F.mse_loss),
    "HuberLossBackward0": lambda node: _with_targets(F.huber_loss, node, delta=node._saved_delta),
    "SmoothL1LossBackward0": lambda node: _with_targets(F.smooth_l1_loss, node, beta=node._saved_beta),
}


def _by_row(losses: Tensor, rows: list[Row]) -> Tensor:
    """The losses as (n, k); a single row may lie across."""
    samples = max(row[0].samples() for row in rows)
    if losses.dim() > 1 and len(losses) == 1 and losses.numel() == samples > 1:
        return losses.reshape(-1, 1)
    return losses.reshape(len(losses) if losses.dim() else 1, -1)


def _rows(start: Node, *, at_node: bool = False) -> list[Row]:
    """The recorded passes below a node, and how far their samples were cut off at the front by slices on the way."""
    found: dict[int, Row] = {}
    seen: set[tuple[Node, int | None]] = set()
    todo: list[tuple[Node, int | None]] = [(start, None)]
    if not at_node:
        todo = [(each, None) for each, _ in start.next_functions]
    while todo:
        node, offset = todo.pop()
        if node is None or (node, offset) in seen:
            continue
        seen.add((node, offset))
        recording = recording_of(node)
        if recording is not None:
            if found.setdefault(id(recording), (recording, offset)) != (recording, offset):
                raise NotATermError("samples of one pass that are compared with each other")
            continue
        if node.name() == "SliceBackward0" and node._saved_dim == 0:
            if node._saved_step != 1:
                raise NotATermError("a slice with steps")
            first, size = node._saved_start, node._saved_self_sym_sizes[0]
            first -= 2**64 if first >= 2**63 else 0  # which torch shows without its sign
            if first != 0 or not size <= node._saved_end < 2**63:  # torch 2.5 slices [:, k:] as [:] first
                offset = (offset or 0) + (first + size if first < 0 else min(first, size))
        todo += [(each, offset) for each, _ in node.next_functions]
    return list(found.values())


def recording_of(node: Node) -> Recording | None:
    """The recorded pass that a node belongs to: a use of a weight there, or an output of the model."""
    uses = getattr(node, "uses", None)
    if uses is not None:
        found: Recording = uses.recording
        return found
    marked: Recording | None = node.metadata.get(MARK) if node.name() in _ALIASES else None
    return marked


def below(tensor: Tensor) -> list[Recording]:
    """The recorded passes that a tensor was computed from."""
    return [row[0] for row in _rows(tensor.grad_fn, at_node=True)] if tensor.grad_fn is not None else []


# -- the scalar that backward() is called on, before its graph is freed ------------------------------------------------

Run = Callable[..., None]
See = Callable[[Tensor, float, Run | None], bool]
_waiting: list[WeakMethod[See]] = []
_backward = torch.autograd.backward


def await_loss(see: See) -> None:
    """Call a method with the scalars that `backward` is called on, until `stop_waiting`.

    It gets their factor, and the function that makes the backward pass; it returns whether it has called that.
    """
    if not any(each() == see for each in _waiting):
        _waiting.append(WeakMethod(see))
    torch.autograd.backward = _watched_backward  # type: ignore[assignment]


def stop_waiting(see: See) -> None:
    _waiting[:] = [each for each in _waiting if each() is not None and each() != see]
    if not _waiting and torch.autograd.backward is _watched_backward:
        torch.autograd.backward = _backward


def _watched_backward(
    tensors: Any, grad_tensors: Any = None, retain_graph: bool | None = None, create_graph: bool = False, **options: Any
) -> None:
    roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    given = grad_tensors if isinstance(grad_tensors, Tensor) or grad_tensors is None else next(iter(grad_tensors), None)

    def run(*, again: bool = False) -> None:
        keep = retain_graph if retain_graph is not None else create_graph
        _backward(tensors, grad_tensors, keep or again, create_graph, **options)

    waiting = [see for see in (each() for each in _waiting) if see is not None]
    if not waiting:
        _waiting.clear()
        torch.autograd.backward = _backward
    if len(roots) == 1 and isinstance(roots[0], Tensor) and roots[0].numel() == 1 and not create_graph:
        factor = 1.0 if given is None else float(given)
        for k, see in enumerate(waiting):
            if see(roots[0], factor, run if k == len(waiting) - 1 and not options.get("inputs") else None):
                return
    run()
