"""Which samples each number depends on: what changes at the layers and outputs if some samples are exchanged."""

from __future__ import annotations

import torch
from torch import Tensor

from ddpnopt.trace.layout import BLOCKS, INTERLEAVED, SECOND, Layout
from ddpnopt.trace.recording import LayerRecord, Recording
from ddpnopt.trace.visitors import Visitor

NOISE = 1e-4  # of the largest number: smaller changes are rounding errors


def halves(batch: int) -> list[Tensor]:
    """Two sets of samples that tell all arrangements apart."""
    if batch < 2:
        return []
    ids = torch.arange(batch)
    sets = [ids < (batch + 1) // 2, ids % 2 == 0, ids % 3 == 0]
    return [chosen for k, chosen in enumerate(sets) if k < 2 or batch > 2]


def kind_of_layout(
    record: LayerRecord | None, x: Tensor, seen: list[tuple[Tensor, Tensor]], batch: int
) -> tuple[str | None, bool]:
    """The layout that explains all changes, and whether there is one; dimension 0 where several or none do."""
    layer = None if record is None else record.layer
    fits = x.dim() > 0 and len(x) == batch
    if batch == 1:
        return (None if fits else BLOCKS), x.dim() > 0
    if fits and seen and all(_confined(change, half, None) for half, change in seen):
        return None, True
    kinds = [
        kind
        for kind in (BLOCKS, INTERLEAVED, SECOND)
        if not (fits and kind != SECOND)
        and Layout(kind, batch).fits(layer, x)
        and seen
        and all(_confined(change, half, kind) for half, change in seen)
    ]
    if len(kinds) == 1:
        return kinds[0], True
    return None, False


def kind_of_repetition(record: LayerRecord, batch: int) -> tuple[str | None, bool]:
    """The same for an input that changes with no sample, but has one copy for each: the queries of a decoder."""
    if batch < 2:
        return None, False
    x, h = record.x, record.h_shape
    kinds: list[str | None] = []
    if x.dim() > 1 and len(x) == batch == h[0] and bool((x == x[:1]).all()):
        kinds.append(None)
    if Layout(SECOND, batch).fits(record.layer, x) and bool((x == x[:, :1]).all()):
        kinds.append(SECOND)
    return (kinds[0], True) if len(kinds) == 1 else (None, False)


def _confined(change: Tensor, half: Tensor, kind: str | None) -> bool:
    """Whether entries change in the samples of `half`, and in no others; `change`: (dimension 0, dimension 1)."""
    batch = len(half)
    if kind == SECOND:
        rows = change.any(0)
        if len(rows) != batch:
            return False
    else:
        rows = change.any(1)
        if kind == BLOCKS:
            rows = rows.view(batch, -1).any(1)
        elif kind == INTERLEAVED:
            rows = rows.view(-1, batch).any(0)
        elif len(rows) != batch:
            return False
    return bool(rows.any()) and not bool(rows[~half].any())


def selected(source: Tensor, dim: int, t: object) -> object:
    """An input with some samples replaced by others; whatever has no samples stays."""
    if not isinstance(t, Tensor) or not t.dim() or t.is_nested:
        return t
    at = min(dim, t.dim() - 1)
    return t.index_select(at, source.to(t.device)) if t.shape[at] == len(source) else t


def differs(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return None if a is None or b is None else changed(a, b)


def changed(a: Tensor, b: Tensor) -> Tensor:
    """Which entries of dimensions 0 and 1 differ: (n0, n1)."""
    if a.shape != b.shape:
        return torch.ones(len(a) if a.dim() else 1, 1, dtype=torch.bool)
    apart = (a != b) if not a.is_floating_point() else (a - b).abs() > NOISE * a.abs().amax().clamp_min(1e-30)
    while apart.dim() < 2:
        apart = apart[..., None]
    return apart.flatten(2).any(2).cpu() if apart.dim() > 2 else apart.cpu()


class Inputs(Visitor):
    """Keeps the input of each recorded use of each layer."""

    def __init__(self, recording: Recording) -> None:
        super().__init__(recording)
        self.order = {(r.name, use): k for k, r in enumerate(recording.layers) for use in r.uses}
        self.seen: list[Tensor | None] = [None] * len(recording.layers)
        self.count: dict[str, int] = {}

    def before(self, layer: object, x: Tensor) -> Tensor | None:
        name = layer.name  # type: ignore[attr-defined]
        use = self.count[name] = self.count.get(name, -1) + 1
        at = self.order.get((name, use))
        if at is not None:
            self.seen[at] = x.detach()
        return None

    def after(self, layer: object, h: Tensor | None) -> Tensor | None:
        return None
