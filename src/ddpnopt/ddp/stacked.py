"""Small linear layers of a step as one: what takes a call for each layer takes one for all of them.

Such layers spend their time between calls, not inside of them. So inputs, output gradients, roots and updates of all T
layers are stacked, padded with zeros, and a bias is the weight of one more input that is 1 and is not mixed with the
others:

    x~ (T, B, n + 1)    p (T, B, o)    roots (T, n + 1, n + 1), (T, o, o)    updates (T, o, n + 1)

A step that is rolled out (`ddp.rollouts`) has its backward pass in this form; then each layer reacts on its own. What
is kept from step to step are the roots, and the last updates, whose parts in the state of the layers are views.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ddpnopt.ddp.balance import Mixing
from ddpnopt.ddp.balanced import OuterProducts
from ddpnopt.ddp.covariance import DENSE, Root
from ddpnopt.ddp.stage import COPIED, Stage
from ddpnopt.linear.layer import Layer, Parts
from ddpnopt.linear.linear import Linear

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


class Stacked:
    """The layers of a step, last to first."""

    def __init__(self, stages: list[Stage]) -> None:
        first = stages[0]
        self._layers = [stage.layer for stage in stages]
        self._most = _most_samples(self._layers)
        self.T = len(stages)
        self._o = max(layer.weight_shape[0] for layer in self._layers)
        self._n = max(layer.weight_shape[1] for layer in self._layers)
        zeros = first.x.new_zeros
        self._input_roots, self._output_roots = (zeros(self.T, k, k) for k in (self._n + 1, self._o))
        self._input_roots[:, -1, -1] = 1  # a bias is not mixed with the others
        self._roots: list[Any] = [None] * (2 * self.T)  # what was copied from there
        self._root_parts = [
            each[t, :k, :k]
            for t, layer in enumerate(self._layers)
            for each, k in ((self._input_roots, layer.weight_shape[1]), (self._output_roots, layer.weight_shape[0]))
        ]
        self._update: Tensor | None = None  # the last one
        self._parts: list[Parts] = []  # its views
        self._places = [self._places_of(t, layer) for t, layer in enumerate(self._layers)]
        self._weights: list[Tensor] = [w for stage in stages for w in stage.weights]
        self._copies: list[Parts] = [[torch.empty_like(w) for w in stage.weights] for stage in stages]
        self._make_room(len(first.x))

    def _make_room(self, B: int) -> None:
        """For the inputs and output gradients of B samples."""
        like, self.B = self._input_roots, B
        self._x, self._p = like.new_zeros(self.T, B, self._n + 1), like.new_zeros(self.T, B, self._o)
        self._recorded: list[Tensor] = []
        for x, p, layer in zip(self._x, self._p, self._layers, strict=True):
            o, n = layer.weight_shape
            self._recorded += [x[:, :n], p[:, :o]]
            x[:, -1] = float(layer.bias)
        self._columns = self._x.mT, self._p.mT

    def _places_of(self, t: int, layer: Any) -> list[tuple[Any, ...]]:
        """Sizes, strides and offset of the parts of layer t in a stacked update."""
        (o, n), row = layer.weight_shape, self._n + 1
        start = t * self._o * row
        weight, bias = ((o, n), (row, 1), start), ((o,), (row,), start + self._n)
        return [weight, bias] if layer.bias else [weight]

    def fits(self, stages: list[Stage]) -> bool:
        """Whether these are the same layers, on inputs of the same kind."""
        if len(stages) != self.T:
            return False
        weights = iter(self._weights)
        dtype = self._x.dtype
        for stage, layer in zip(stages, self._layers, strict=True):
            x = stage.x
            if stage.layer is not layer or x.dim() != 2 or x.dtype != dtype or stage.later is not None:
                return False
            if any(w is not next(weights) for w in stage.weights):
                return False
        return stages[0].peers.alone and len(stages[0].x) <= self._most

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
        """Take in what was recorded, roots that have changed, and the last updates, where they are known."""
        B = stages[0].x.shape[0]
        if B != self.B:
            self._make_room(B)
        torch._foreach_copy_(self._recorded, [a for stage in stages for a in (stage.x, stage.p_h[0])])
        roots = [root for stage in stages for root in (stage.state["input_root"], stage.state["output_root"])]
        new = [k for k, (root, known) in enumerate(zip(roots, self._roots, strict=True)) if root is not known]
        if new:
            torch._foreach_copy_([self._root_parts[k] for k in new], [Root(roots[k]).power(2) for k in new])
            self._roots = roots
        if lasts is None:
            self._update = None
        elif not self._are_known(lasts):
            self._keep(self._input_roots.new_zeros(self.T, self._o, self._n + 1))
            torch._foreach_copy_([v for views in self._parts for v in views], [v for last in lasts for v in last])

    def _are_known(self, lasts: list[Parts]) -> bool:
        """Whether these are the parts of the update that this has made."""
        if self._update is None:
            return False
        each = zip(lasts, self._parts, strict=True)
        return all(a is b for last, views in each for a, b in zip(last, views, strict=True))

    def _keep(self, update: Tensor) -> None:
        self._update = update
        self._parts = [[update.as_strided(*place) for place in places] for places in self._places]

    def couple(self) -> tuple[Tensor, Tensor | None]:
        """K = P_u' M^-1 P_u of each layer, (T, B, B), and the effect of its last update on each sample, (T, B)."""
        x, p = self._x, self._p
        self._raised_x, self._raised_p = torch.bmm(x, self._input_roots), torch.bmm(p, self._output_roots)
        K = torch.bmm(self._raised_x, self._columns[0]).mul_(torch.bmm(self._raised_p, self._columns[1]))
        if self._update is None:
            return K, None
        return K, torch.linalg.vecdot(p, torch.bmm(x, self._update.mT))

    def gradients(self, stages: list[Stage]) -> list[OuterProducts]:
        """Those of each layer, which it needs to react to its new input."""
        found = []
        for stage, x, p in zip(stages, self._raised_x, self._raised_p, strict=True):
            o, n = stage.layer.weight_shape
            stage.balance = Mixing.known(stage.layer, stage.state)
            assert isinstance(stage.layer, Linear)
            found.append(OuterProducts(stage.layer, stage.x, stage.p_h[0], (x[:, :n], p[:, :o])))
        return found

    def updates(self, w: Tensor, share: float) -> tuple[list[Parts], list[list[float]]]:
        """share times the last updates + M^-1 P_u w for weights w of the samples, (T, B, 1); the norms of the parts."""
        p, x, last = (self._raised_p * w).mT, self._raised_x, self._update
        new = torch.bmm(p, x) if last is None or not share else torch.baddbmm(last, p, x, beta=share)
        self._keep(new)
        # faster with a copy than without
        weights = torch.linalg.vector_norm(new.narrow(2, 0, self._n).flatten(1), dim=1).tolist()
        biases = torch.linalg.vector_norm(new.select(2, self._n), dim=1).tolist()
        each = zip(self._parts, weights, biases, strict=True)
        return self._parts, [[weight, bias][: len(parts)] for parts, weight, bias in each]

    def change(self, stages: list[Stage], updates: list[Parts], norms: list[list[float]]) -> None:
        """weights <- weights - update, with a copy of the old ones."""
        torch._foreach_copy_([w for copies in self._copies for w in copies], self._weights)
        torch._foreach_sub_(self._weights, [part for update in updates for part in update])
        for stage, update, copies, of_parts in zip(stages, updates, self._copies, norms, strict=True):
            stage.u, stage.kept, stage.changed = copies, True, True
            stage.update, stage.norms = update, of_parts


class Stacking:
    """The layers of an optimizer as one, from step to step."""

    def __init__(self) -> None:
        self._found: Stacked | None = None

    def of(self, stages: list[Stage]) -> Stacked | None:
        """These layers, last to first, as one; None where they have to be visited one by one."""
        if self._found is None or not self._found.fits(stages):
            self._found = Stacked(stages) if can_be_stacked(stages) else None
        return self._found
