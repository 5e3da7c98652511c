"""Every use of a linear layer's weight in a pass whose derivatives may become part of the loss.

The layer runs as a function of autograd of our own. Its backward pass, where it is to be differentiated again
(`create_graph=True`), consists of such functions, too: h = W x + b, W' p, W q, … for derivatives of any order. In the
backward pass of the loss each of them notes its input and the gradient at its output, from which the gradients of the
samples follow (`ddpnopt.linear.uses`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from ddpnopt.linear.layer import Parts
from ddpnopt.linear.linear import Linear
from ddpnopt.linear.uses import Use, gradient_of
from ddpnopt.trace.model_layers import ModelLayer
from ddpnopt.trace.recording import LayerRecord, Recording, is_derivative

if TYPE_CHECKING:
    from ddpnopt.trace.arrivals import Arrivals


@dataclass(eq=False)
class Noted:
    """The uses of one layer's weight in one pass, from the backward pass of the loss."""

    arrivals: Arrivals
    found: list[Use] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)  # of the backward pass (`trace.parts`) that each is from

    def gradient(self) -> Parts:
        """The sum over all uses: [W, b], or less where there is none."""
        return gradient_of(self.found) if self.found else []

    def scale(self, factor: float) -> None:
        """Replace the gradients by those of `factor` times the loss."""
        self.found = [(x, p * factor, biased) for x, p, biased in self.found]


@dataclass(eq=False)
class WeightUses:
    """What notes these uses. The nodes of the graph have it: the recording has only the notes, so there is no cycle."""

    recording: Recording
    noted: Noted
    skipped: bool  # whether autograd is spared the weight gradients
    anchor: Tensor  # makes each use a node of the graph, and tells the backward pass of the loss from others
    nodes: list[Any]  # that accumulate the gradients of weight and bias

    @classmethod
    def of(cls, recording: Recording, record: LayerRecord, anchor: Tensor) -> WeightUses:
        nodes = [p.view_as(p).grad_fn.next_functions[0][0] for p in record.parameters]  # type: ignore[union-attr]
        assert record.noted is not None
        return cls(recording, record.noted, record.skipped, anchor, nodes)

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """h = W x + b."""
        h: Tensor = _Applied.apply(x, weight, bias, self.anchor, self)  # type: ignore[no-untyped-call]
        return h

    def note(self, x: Tensor, p: Tensor, biased: bool) -> None:
        arrivals = self.noted.arrivals
        if not is_derivative(self.recording):
            arrivals.note_uses(self.recording)
            self.noted.found.append((x.detach(), p.detach(), biased))
            self.noted.parts.append(arrivals.part)

    def wants_weight_gradients(self) -> bool:
        """Whether the backward pass that is running has to return the gradients of weight and bias."""
        return any(map(_will_run, self.nodes)) if torch.is_grad_enabled() else not self.skipped


def _will_run(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # autograd.grad(…) has asked for it
        return True


def can_be_noted(model_layer: ModelLayer) -> bool:
    """Whether the layer is a plain `nn.Linear`, and no dual numbers (forward-mode derivatives) are in use."""
    plain = type(model_layer.module).forward is nn.Linear.forward and type(model_layer.layer) is Linear
    return plain and forward_ad._current_level < 0


class _Applied(torch.autograd.Function):
    """W x + b."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, anchor: Tensor, uses: WeightUses) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.uses, ctx.biased = uses, bias is not None
        h = F.linear(x, weight, bias)
        return h.clone() if h._is_view() else h  # which would forbid operations in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (p,), (x, weight), uses, needed = grads, ctx.saved_tensors, ctx.uses, ctx.needs_input_grad
        uses.note(x, p, ctx.biased)
        p_x = p_w = p_b = None
        if needed[0]:
            again = torch.is_grad_enabled()
            p_x = _Transposed.apply(p, weight, uses.anchor, uses) if again else p @ weight  # type: ignore[no-untyped-call]
        if uses.wants_weight_gradients():
            p_w = p.flatten(0, -2).mT @ x.flatten(0, -2) if needed[1] else None
            p_b = p.flatten(0, -2).sum(0) if needed[2] else None
        return p_x, p_w, p_b, None, None


class _Transposed(torch.autograd.Function):
    """W' p: the derivative of the layer by its input."""

    @staticmethod
    def forward(ctx: Any, p: Tensor, weight: Tensor, anchor: Tensor, uses: WeightUses) -> Tensor:
        ctx.save_for_backward(p, weight)
        ctx.uses = uses
        return p @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (q,), (p, weight), uses, needed = grads, ctx.saved_tensors, ctx.uses, ctx.needs_input_grad
        uses.note(q, p, False)
        q_p = q_w = None
        if needed[0]:
            again = torch.is_grad_enabled()
            q_p = uses.apply(q, weight, None) if again else F.linear(q, weight)
        if needed[1] and uses.wants_weight_gradients():
            q_w = p.flatten(0, -2).mT @ q.flatten(0, -2)
        return q_p, q_w, None, None
