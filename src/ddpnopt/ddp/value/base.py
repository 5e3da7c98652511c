"""What the value functions have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ddpnopt._distributed import ALONE, Peers
from ddpnopt.linear.layer import Layer, Parts, per_sample_dot
from ddpnopt.linear.metric import Metric
from ddpnopt.linear.sample_gradients import Explicit, SampleGradients, Sums, sample_gradients


@dataclass(eq=False)
class Problem:
    """Stage t of the control problem, on plain tensors."""

    name: str
    layer: Layer
    x: Tensor  # (B, …)
    u: Parts  # nominal weights
    eta: float  # Q_uu = M / eta
    p_h: list[Tensor]  # for each column (the gradient first): cotangents at the output, as shares of the loss
    p_x: list[Tensor | None]  # … and at the input, through this layer; None where it was not caught
    l_u: Parts | None = None  # gradient of the stage cost (weight decay)
    p_h_dot_h: Tensor | None = None  # <p_h, h> of the gradient, where known
    peers: Peers = ALONE  # with whom the batch is shared
    recompute: bool | None = None  # whether gradients of samples are formed twice rather than kept
    moves: bool = True  # whether x depends on the layers before
    state: dict[str, Any] = field(default_factory=dict)  # what the value function keeps from step to step
    _gradients: SampleGradients | None = field(default=None, init=False)

    @property
    def batch(self) -> int:
        """Samples in the whole batch."""
        return self.peers.batch(len(self.x))

    def let_go(self) -> None:
        """Forget the tensors of the size of the activations."""
        self.x, self.p_h, self.p_x, self._gradients = self.x.new_empty(0), [], [], None

    @property
    def slopes_caught(self) -> bool:
        """Whether <p_x, dx> can be had without p_h."""
        return not self.moves or all(p is not None for p in self.p_x)

    def let_go_of_slopes(self, displacement: Displacement) -> None:
        """Forget p_h where the forward pass reads nothing but the samples' gradients, which are written out."""
        if isinstance(self._gradients, Explicit) and displacement.chain and self.slopes_caught:
            self.p_h = []

    def gradients(self, *, coupled: bool) -> SampleGradients:
        """P_u of all columns, column r of sample i in row r B + i; coupled: each will be multiplied with all others."""
        if self._gradients is None:
            R = len(self.p_h)
            x, p = (self.x, self.p_h[0]) if R == 1 else (torch.cat([self.x] * R), torch.cat(self.p_h))
            others = R * self.batch if coupled else 1
            self._gradients = sample_gradients(self.layer, x, p, others=others, recompute=self.recompute)
        return self._gradients


@dataclass(eq=False)
class Direction:
    """d = l_u + sum over the batch of g_u' V_h + Q_ux dx: the sum of our samples written out, or as their weights w."""

    summed: Parts | None = None
    gradients: Sums | None = None
    w: Tensor | None = None
    l_u: Parts | None = None
    peers: Peers = ALONE
    _written: Parts | None = None

    def parts(self) -> Parts:
        if self._written is None:
            if self.summed is None:
                assert self.gradients is not None
                assert self.w is not None
                self.summed = self.gradients.combine(self.w)
            self._written = add(self.peers.sum(self.summed), self.l_u)
        return self._written

    def _own(self) -> tuple[Sums, Tensor] | None:
        """Gradients and weights, where the sum is over our samples alone and need not be written out."""
        if self.peers.alone and self._written is None and self.gradients is not None and self.w is not None:
            return self.gradients, self.w
        return None

    def solved(self, layer: Layer, metric: Metric) -> Parts:
        """M^-1 d."""
        own = self._own()
        if own is not None:
            solved = own[0].solved(own[1], metric)
            return solved if self.l_u is None else add(solved, metric.solve(layer, self.l_u))
        return metric.solve(layer, self.parts())

    def add_to(self, u: list[Tensor], alpha: float) -> None:
        """u <- u + alpha d."""
        own = self._own()
        if own is not None:
            own[0].add_to(u, own[1], alpha)
            extra = self.l_u
        else:
            extra = self.parts()
        for weight, part in zip(u, extra or [], strict=extra is not None):
            weight.add_(part, alpha=alpha)


Policy = Callable[[Tensor | None], Direction]
"""d(x^), so that du = -eta M^-1 d; None stands for dx = 0."""


class ValueFunction(Protocol):
    """V at the current stage; `backward` moves it from t+1 to t."""

    def v_h(self, stage: Problem) -> Tensor:
        """V_h of each sample: like h."""

    def gradient(self, stage: Problem) -> Parts:
        """sum_i g_u' V_h over our own samples, without the stage cost."""

    def prepare(self, stage: Problem) -> None:
        """This stage comes next: what must be fetched from other processes may set out."""

    def backward(self, stage: Problem, metric: Metric) -> Policy:
        """Eq. 4 and 5 at one stage: store what the policy needs, then V_x and V_xx of the stage before."""

    @property
    def guarded_share(self) -> float:
        """The share of sample-layers where s > 1: clipped, or kept in bounds by the guard."""

    def predicted(self) -> float | None:
        """The change of the batch loss by the quadratic model; None where it is the sum of the stages' own."""


class Displacement:
    """c_t = <p_x, dx>: what the layers before t have done to the predicted loss, for each column and sample.

    In a chain it is taken at the input of layer t, exactly. In any other graph the state has parts that no layer's
    input shows (skip connections), and c_t is kept as a ledger: each layer adds what its own update has done,
    <p_h, h^ - h> - <p_x, x^ - x>. Where p_x was not caught, the layer is applied once more: <p_x, dx> = <p_h, g_x dx>,
    and the entry is <p_h, g(x^, du)>.
    """

    def __init__(self, chain: bool, once: bool = False) -> None:
        self.chain, self.once = chain, once  # once: p_x is let go as soon as it has been asked for
        self._ledger: list[Tensor] | None = None

    def reset(self) -> None:
        """Begin a forward pass."""
        self._ledger = None

    def at(self, stage: Problem, x_hat: Tensor | None) -> Tensor | None:
        """c_t as (R B,); None for zero."""
        if x_hat is None:
            return None
        if not self.chain:
            return None if self._ledger is None else _cat(self._ledger)
        if not stage.moves:
            return None
        x_hat = x_hat.to(stage.x.dtype)
        if not stage.slopes_caught:
            dh = stage.layer.apply(x_hat - stage.x, stage.u[:1])
            return _cat([per_sample_dot(p, dh) for p in stage.p_h])
        c = _cat([per_sample_dot(p, x_hat, stage.x) for p in stage.p_x if p is not None])
        if self.once:
            stage.p_x = []
        return c

    def after(self, stage: Problem, x_hat: Tensor, h_hat: Tensor, new_u: Parts) -> None:
        """Enter into the ledger what stage t has done."""
        if stage.p_h_dot_h is not None and len(stage.p_h) == 1 and stage.slopes_caught:
            own = per_sample_dot(stage.p_h[0], h_hat.to(stage.p_h[0].dtype)) - stage.p_h_dot_h
            if stage.moves and stage.p_x[0] is not None:
                own = own - per_sample_dot(stage.p_x[0], x_hat.to(stage.x.dtype), stage.x)
            entries = [own]
        else:
            du = [new - old for new, old in zip(new_u, stage.u, strict=True)]
            dh = stage.layer.apply(x_hat.to(stage.x.dtype), du)
            entries = [per_sample_dot(p, dh) for p in stage.p_h]
        before = self._ledger
        self._ledger = entries if before is None else [a + b for a, b in zip(before, entries, strict=True)]


def _cat(columns: list[Tensor]) -> Tensor:
    return columns[0] if len(columns) == 1 else torch.cat(columns)


def add(a: Parts, b: Parts | None) -> Parts:
    return a if b is None else [p + q for p, q in zip(a, b, strict=True)]


def inner(a: Parts, b: Parts) -> Tensor:
    return torch.stack([torch.vdot(p.flatten(), q.flatten()) for p, q in zip(a, b, strict=True)]).sum()
