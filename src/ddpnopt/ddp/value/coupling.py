"""The Gram matrix of a batch that is distributed over several processes.

Each process gathers the gradients of all samples in the form with fewer bytes, multiplies its own rows with them and
distributes the result: every process has all of K, bit for bit the same, and has computed a part of it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ddpnopt.ddp.stage import Stage
from ddpnopt.linear.linear import RankOne
from ddpnopt.linear.metric import Metric
from ddpnopt.linear.sample_gradients import ByPlaces, Explicit, SampleGradients


class Coupling:
    """P_u of one stage; the exchange starts at once, to overlap with the computation of the stage after it."""

    def __init__(self, stage: Stage) -> None:
        combined = stage.sketched
        self.stage = stage
        self.own: SampleGradients = stage.gradients(coupled=True) if combined is None else combined.combined()
        R, peers = len(stage.p_h), stage.peers
        own = self.own
        self._ids: Callable[[], Tensor] | None = None  # x where it has integers, which float32 may not hold
        factors = stage.x[0].numel() + sum(p[0].numel() for p in stage.p_h)
        self._explicit = isinstance(own, Explicit) and (combined is not None or R * own.weight[0].numel() < factors)
        if isinstance(own, Explicit) and self._explicit:
            parts = [own.weight] if own.bias is None else [own.weight, own.bias]
            self._later = peers.gather_later(torch.cat([p.flatten(1) for p in parts], 1), R)
        else:
            if not stage.x.is_floating_point():  # ids of an embedding
                self._ids = peers.gather_later(stage.x.flatten(1))
            floating = self._factors()
            self._shapes = [f.shape[1:] for f in floating]
            self._later = peers.gather_later(torch.cat([f.flatten(1) for f in floating], 1))

    def _factors(self) -> list[Tensor]:
        """Inputs, unless they are ids, and output gradients, in the variables of the stage, or combinations of them."""
        stage, balance = self.stage, self.stage.balance
        if stage.sketched is not None and isinstance(self.own, RankOne):
            return [self.own.x, self.own.p]
        x, p_h = stage.x, stage.p_h
        if balance is not None:
            x, p_h = balance.inputs(x), [balance.outputs(p) for p in p_h]
        return p_h if self._ids is not None else [x, *p_h]

    def gram(self, metric: Metric, extra: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """K of all samples; with `extra` numbers of our own samples, those of all, too."""
        stage = self.stage
        rows = self._rows(metric)
        if extra is not None:
            rows = torch.cat([rows, extra[:, None].to(rows.dtype)], 1)  # one exchange for both
        K = stage.peers.gather(rows, len(stage.p_h))
        return (K, None) if extra is None else (K[:, :-1], K[:, -1])

    def _rows(self, metric: Metric) -> Tensor:
        arrived, own, R = self._later(), self.own, len(self.stage.p_h)
        layer = own.layer if isinstance(own, (Explicit, ByPlaces)) else self.stage.layer  # with balanced places
        if isinstance(own, Explicit) and self._explicit:
            return own.gram(metric, Explicit.of(layer, own, arrived))
        ids = None if self._ids is None else self._ids().reshape(-1, *self.stage.x.shape[1:])
        pieces = arrived.split([shape.numel() for shape in self._shapes], 1)
        found = [piece.reshape(-1, *shape) for piece, shape in zip(pieces, self._shapes, strict=True)]
        x, *p_h = found if ids is None else [ids, *found]
        x, p = torch.cat([x] * R) if R > 1 else x, torch.cat(p_h)
        if not isinstance(own, Explicit):
            return own.gram(metric, type(own)(layer, x, p))  # type: ignore[call-arg]
        some = max(1, len(own.weight))  # no more explicit gradients at once than our own
        blocks = [own.gram(metric, Explicit(layer, a, b)) for a, b in zip(x.split(some), p.split(some), strict=True)]
        return torch.cat(blocks, 1)
