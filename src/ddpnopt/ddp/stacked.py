"""Small linear layers of a step as one: what takes a call for each layer takes one for all of them.

Such layers spend their time between calls, not inside of them. So inputs, output gradients, roots, weights and updates
of all T layers are stacked, padded with zeros, and a bias is the weight of one more input, which is 1 or, without a
bias, 0:

    x (T, B, n)    p (T, B, o)    roots (T, n, n), (T, o, o)    weights (T, o, n), (T, o)    updates like weights

In a step that is rolled out (`ddp.rollouts`) each layer reacts on its own, with its part of what is stacked. What is
kept from step to step are the roots, and two updates: the last one, whose parts in the state of the layers are views
that have to stay as they are until the next one is complete, and the next one, in the place of the one before.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ddpnopt.ddp.covariance import DENSE, square_into
from ddpnopt.ddp.stage import COPIED, Displacement, Stage
from ddpnopt.linear.layer import Layer, Parts
from ddpnopt.linear.linear import Linear

if TYPE_CHECKING:
    from ddpnopt.ddp.sweep import Replay

ByStage = Callable[[int, Tensor | None], Tensor]
"""From c_t of a stage, None for zero, to the weights of the samples in its update."""

WASTED = 2**18  # multiplications with zeros, for each layer: more of them take longer than the calls that are saved
FEW = 64  # samples: with more of them the cost of a call is negligible


def can_be_stacked(stages: list[Stage]) -> bool:
    """Whether these are several small linear layers on (B, n) inputs, alone on the CPU, in one precision."""
    first = stages[0]
    if len(stages) < 2 or not first.peers.alone or first.x.device.type != "cpu":
        return False
    dtype = first.x.dtype
    if dtype not in (torch.float32, torch.float64):
        return False
    for stage in stages:
        if type(stage.layer) is not Linear or not stage.layer.mixes_features or stage.later is not None:
            return False
        if stage.x.dim() != 2 or len(stage.p_h) > 1:
            return False
        o, n = stage.layer.weight_shape
        if max(o, n) > DENSE or o * n > COPIED or stage.x.dtype != dtype or stage.weights[0].dtype != dtype:
            return False
    return len(first.x) <= _most_samples([stage.layer for stage in stages])


def _most_samples(layers: list[Layer]) -> int:
    """Up to so many of them it takes less time to multiply stacked layers, with their zeros, than one by one."""
    sides = [(layer.weight_shape[0], layer.weight_shape[1]) for layer in layers]
    o, n = (max(each) for each in zip(*sides, strict=True))
    wasted = len(layers) * (o * o + n * n) - sum(o * o + n * n for o, n in sides)
    return min(FEW, WASTED * len(layers) // wasted) if wasted else FEW


class Update:
    """An update of all layers, or their weights: those of the inputs and those of the constant one."""

    def __init__(self, layers: list[Layer], like: Tensor) -> None:
        o, n = (max(layer.weight_shape[k] for layer in layers) for k in (0, 1))
        self.weights, self.biases = like.new_zeros(len(layers), o, n), like.new_zeros(len(layers), o, 1)
        self.rows = self.weights.view(len(layers), -1), self.biases.view(len(layers), -1)
        self.columns = self.weights.mT, self.biases.mT
        self.parts: list[Parts] = []  # views, of each layer
        for layer, weight, bias in zip(layers, self.weights, self.biases, strict=True):
            o, n = layer.weight_shape
            self.parts.append([weight[:o, :n], bias[:o, 0]] if layer.bias else [weight[:o, :n]])
        self.flat = [part for parts in self.parts for part in parts]

    def clear(self) -> None:
        """Set everything to zero; around the parts there may be what a step has left that has failed."""
        self.weights.zero_()
        self.biases.zero_()

    def norms(self) -> list[list[float]]:
        """Those of the parts of each layer."""
        weights, biases = (torch.linalg.vector_norm(rows, dim=1).tolist() for rows in self.rows)
        each = zip(self.parts, weights, biases, strict=True)
        return [[weight, bias][: len(parts)] for parts, weight, bias in each]


class Stacked:
    """The layers of a step, last to first."""

    def __init__(self, stages: list[Stage]) -> None:
        first = stages[0]
        self._layers = [stage.layer for stage in stages]
        self._most = _most_samples(self._layers)
        self.T = len(stages)
        self._old, *self._updates = (Update(self._layers, first.x) for _ in range(3))
        self._last: Update | None = None  # the last one of the updates, where it is known
        _, self._o, self._n = self._old.weights.shape
        zeros = first.x.new_zeros
        self._input_roots, self._output_roots = (zeros(self.T, k, k) for k in (self._n, self._o))
        self._roots: list[Any] = [None] * (2 * self.T)  # what was computed from these
        self._root_parts = [
            each[t, :k, :k]
            for t, layer in enumerate(self._layers)
            for each, k in ((self._input_roots, layer.weight_shape[1]), (self._output_roots, layer.weight_shape[0]))
        ]
        self._weights: list[Tensor] = [w for stage in stages for w in stage.weights]
        self._ones = first.x.new_tensor([float(layer.bias) for layer in self._layers]).view(-1, 1, 1)
        self._make_room(len(first.x))

    def _make_room(self, B: int) -> None:
        """For the inputs and output gradients of B samples."""
        like, self.B = self._input_roots, B
        self._x, self._p = like.new_zeros(self.T, B, self._n), like.new_zeros(self.T, B, self._o)
        self._recorded: list[Tensor] = []
        for x, p, layer in zip(self._x, self._p, self._layers, strict=True):
            o, n = layer.weight_shape
            self._recorded += [x[:, :n], p[:, :o]]
        self._columns = self._x.mT, self._p.mT
        self._constant = self._ones.expand(-1, B, 1).contiguous()  # the inputs of the biases

    def fits(self, stages: list[Stage]) -> bool:
        """Whether these are the same layers, on inputs of the same kind."""
        if len(stages) != self.T:
            return False
        dtype = self._x.dtype
        for stage, layer in zip(stages, self._layers, strict=True):
            x = stage.x
            if stage.layer is not layer or x.dim() != 2 or x.dtype != dtype or stage.later is not None:
                return False
        same = len(self._weights) == sum(len(stage.weights) for stage in stages) and all(
            map(is_, self._weights, (w for stage in stages for w in stage.weights))
        )
        return same and stages[0].peers.alone and len(stages[0].x) <= self._most

    def knows_all(self, stages: list[Stage], dtype: torch.dtype) -> bool:
        """Whether all last updates are known, or none, and there are no stage costs; `dtype` is that of the losses."""
        if dtype != self._x.dtype or any(stage.l_u is not None for stage in stages):
            return False
        lasts = [stage.state.get("update") for stage in stages]
        if all(last is None for last in lasts):
            return True
        return all(
            last is not None and len(last) == len(stage.weights) and last[0].dtype == dtype
            for last, stage in zip(lasts, stages, strict=True)
        )

    def load(self, stages: list[Stage], lasts: list[Parts] | None) -> None:
        """Take in weights and what was recorded, roots that have changed, and the last updates, where they are known.

        The stages get copies of their weights.
        """
        B = stages[0].x.shape[0]
        if B != self.B:
            self._make_room(B)
        recorded = [a for stage in stages for a in (stage.x, stage.p_h[0])]
        torch._foreach_copy_([*self._recorded, *self._old.flat], [*recorded, *self._weights])
        for stage, old in zip(stages, self._old.parts, strict=True):
            stage.u, stage.kept = old, True
        self._last = None if lasts is None else self._update_of([part for last in lasts for part in last])
        roots = [root for stage in stages for root in (stage.state["input_root"], stage.state["output_root"])]
        new = [k for k, (root, known) in enumerate(zip(roots, self._roots, strict=True)) if root is not known]
        if new:
            square_into([self._root_parts[k] for k in new], [roots[k] for k in new])
        self._roots = roots

    def _update_of(self, parts: Parts) -> Update:
        """The one with these parts, or one that has copies of them."""
        for update in self._updates:
            if all(map(is_, update.flat, parts)):
                return update
        if any(any(map(is_, update.flat, parts)) for update in self._updates):
            self._updates = [Update(self._layers, self._x) for _ in range(2)]  # some of them have to stay
        kept = self._updates[0]
        kept.clear()
        torch._foreach_copy_(kept.flat, parts)
        return kept

    def sizes(self) -> list[float]:
        """The norms of the weights, without biases."""
        return torch.linalg.vector_norm(self._old.rows[0], dim=1).tolist()

    def couple(self) -> tuple[Tensor, Tensor | None]:
        """K = P_u' M^-1 P_u of each layer, (T, B, B), and the effect of its last update on each sample, (T, B)."""
        x, p, last = self._x, self._p, self._last
        self._raised_x, self._raised_p = torch.bmm(x, self._input_roots), torch.bmm(p, self._output_roots)
        K = torch.baddbmm(self._ones, self._raised_x, self._columns[0])
        K.mul_(torch.bmm(self._raised_p, self._columns[1]))
        if last is None:
            return K, None
        return K, torch.linalg.vecdot(p, torch.baddbmm(last.columns[1], x, last.columns[0]))

    def updates(self, w: Tensor, share: float) -> tuple[list[Parts], list[list[float]]]:
        """share times the last updates + M^-1 P_u w for weights w of the samples, (T, B, 1); the norms of the parts."""
        new, last, share = self._next(share)
        p = (self._raised_p * w).mT
        torch.baddbmm(last.weights, p, self._raised_x, beta=share, out=new.weights)
        torch.baddbmm(last.biases, p, self._constant, beta=share, out=new.biases)
        return [list(parts) for parts in new.parts], new.norms()  # the state of a layer may change its list

    def _next(self, share: float) -> tuple[Update, Update, float]:
        """The place of the next update, the last one, and the share of it: by 0 nothing of it is read."""
        new = self._updates[self._last is self._updates[0]]
        return (new, new, 0.0) if self._last is None else (new, self._last, share)

    def change(self, stages: list[Stage], updates: list[Parts], norms: list[list[float]]) -> None:
        """weights <- weights - update."""
        for stage, update, of_parts in zip(stages, updates, norms, strict=True):
            stage.changed, stage.update, stage.norms = True, update, of_parts
        torch._foreach_sub_(self._weights, [part for update in updates for part in update])

    def roll_out(
        self, stages: list[Stage], replay: Replay, displacement: Displacement, solve: ByStage, share: float
    ) -> list[Tensor]:
        """Change each layer when its new input is known, with the weights w that it asks for; the new outputs."""
        new, last, share = self._next(share)
        stacks = self._raised_x, self._raised_p.mT, last.weights, last.rows[1], new.weights, new.rows[1]
        parts = list(zip(*(stack.unbind() for stack in stacks), strict=True))
        x_hats: dict[int, Tensor] = {}  # of layers whose new output is not known yet

        def control(t: int, x_hat: Tensor) -> None:
            k = self.T - 1 - t
            stage, update, (x, p, weight, bias, new_weight, new_bias) = stages[k], new.parts[k], parts[k]
            w, eta = solve(k, displacement.at(stage, x_hat)), stage.eta
            torch.addmm(weight, p * w, x, beta=share, alpha=eta, out=new_weight)
            if len(update) > 1:
                torch.addmv(bias, p, w, beta=share, alpha=eta, out=new_bias)
            stage.changed, stage.update, x_hats[t] = True, list(update), x_hat
            torch._foreach_sub_(stage.weights, update)

        def observe(t: int, h_hat: Tensor) -> None:
            displacement.after(stages[self.T - 1 - t], x_hats.pop(t), h_hat)

        outputs = replay(control, None if displacement.chain else observe)
        for stage, norms in zip(stages, new.norms(), strict=True):
            stage.norms = norms
        return outputs


class Stacking:
    """The layers of an optimizer as one, from step to step."""

    def __init__(self) -> None:
        self._found: Stacked | None = None

    def of(self, stages: list[Stage]) -> Stacked | None:
        """These layers, last to first, as one; None where they have to be visited one by one."""
        if self._found is None or not self._found.fits(stages):
            self._found = Stacked(stages) if can_be_stacked(stages) else None
        return self._found
