"""Attention and recurrent networks of `torch.nn`, and the same written by hand with `nn.Linear`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

N, CLASSES = 4, 3  # features and classes


def sequences(n: int = 5, length: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, length, N, generator=g), torch.randint(CLASSES, (n,), generator=g)


class Attends(nn.Module):
    """A layer, attention of one kind, residual, and a layer."""

    def __init__(self, kind: str, batch_first: bool = True, **options: float) -> None:
        super().__init__()
        self.kind, self.batch_first = kind, batch_first
        self.into, self.out = nn.Linear(N, N), nn.Linear(N, CLASSES)
        self.attention = nn.MultiheadAttention(N, 2, batch_first=batch_first, **options)  # type: ignore[arg-type]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.batch_first:
            found: Tensor = self.attention(q, k, v)[0]
            return found
        if k is v:
            q, k = q.transpose(0, 1), k.transpose(0, 1) if k is not q else q.transpose(0, 1)
            k = q if self.kind == "self" else k
            return self.attention(q, k, k, need_weights=False)[0].transpose(0, 1)
        return self.attention(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1))[0].transpose(0, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.into(x))
        if self.kind == "self":
            h = self.attend(x, x, x)
        elif self.kind == "cross":
            memory = x[:, :-1]
            h = self.attend(x, memory, memory)
        else:
            h = self.attend(x, x[:, 1:], 2 * x[:, :-1])
        return self.out((x + h).mean(1))


class AttendsByHand(Attends):
    """The same with `nn.Linear`, whose uses for queries, keys and values each read a part of the outputs."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.attention = nn.ModuleDict({"packed": nn.Linear(N, 3 * N), "last": nn.Linear(N, N)})  # type: ignore[assignment]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        packed = self.attention["packed"]  # type: ignore[index]
        if self.kind == "self":
            q, k, v = packed(q).chunk(3, -1)
        elif self.kind == "cross":
            q, (k, v) = packed(q)[..., :N], packed(k)[..., N:].chunk(2, -1)
        else:
            q, k, v = packed(q)[..., :N], packed(k)[..., N : 2 * N], packed(v)[..., 2 * N :]
        q, k, v = (a.unflatten(-1, (2, -1)).transpose(1, 2) for a in (q, k, v))
        return self.attention["last"](F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))  # type: ignore[index]


KINDS: dict[str, tuple[type[nn.RNNBase], type[nn.RNNCellBase], int]] = {
    "LSTM": (nn.LSTM, nn.LSTMCell, 4), "GRU": (nn.GRU, nn.GRUCell, 3), "RNN": (nn.RNN, nn.RNNCell, 1),
}  # fmt: skip


class Recurs(nn.Module):
    """A layer, recurrent layers over the sequence, and a layer on the last output."""

    def __init__(self, kind: str, layers: int = 1, directions: int = 1, batch_first: bool = True) -> None:
        super().__init__()
        self.kind, self.layers, self.directions, self.batch_first = kind, layers, directions, batch_first
        self.into, self.out = nn.Linear(N, N), nn.Linear(2 * 3 * directions, CLASSES)
        self.recurrent = KINDS[kind][0](N, 3, layers, bidirectional=directions == 2, batch_first=batch_first)  # type: ignore[arg-type]

    def run(self, x: Tensor) -> Tensor:
        found: Tensor = self.recurrent(x if self.batch_first else x.transpose(0, 1))[0]
        return found if self.batch_first else found.transpose(0, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.run(torch.tanh(self.into(x)))
        return self.out(torch.cat([h[:, -1], h.mean(1)], 1))


def after(kind: str, gx: Tensor, gh: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """One time step from the gates of inputs and states."""
    if kind == "LSTM":
        i, f, g, o = (gx + gh).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c
    if kind == "RNN":
        return (gx + gh).tanh(), c
    (r, z, n), (s, y, m) = gx.chunk(3, 1), gh.chunk(3, 1)
    z = (z + y).sigmoid()
    return (1 - z) * torch.tanh(n + (r + s).sigmoid() * m) + z * h, c


class RecursByHand(Recurs):
    """The same as loops over cells of two `nn.Linear`, the one of the inputs applied to all times at once."""

    def __init__(self, kind: str, layers: int = 1, directions: int = 1) -> None:
        super().__init__(kind, layers, directions)
        gates = 3 * KINDS[kind][2]
        pairs = [
            (nn.Linear(N if layer == 0 else 3 * directions, gates), nn.Linear(3, gates))
            for layer in range(layers)
            for _ in range(directions)
        ]
        self.recurrent = nn.ModuleList([each for pair in pairs for each in pair])  # type: ignore[assignment]

    def run(self, x: Tensor) -> Tensor:
        cells = iter(self.recurrent)
        for _ in range(self.layers):
            found = []
            for direction in range(self.directions):
                gx = next(cells)(x.flip(1) if direction else x)
                of_states, h, outs = next(cells), gx.new_zeros(len(x), 3), []
                c = h
                for t in range(x.shape[1]):
                    h, c = after(self.kind, gx[:, t], of_states(h), h, c)
                    outs.append(h)
                found.append(torch.stack(outs[::-1] if direction else outs, 1))
            x = torch.cat(found, 2)
        return x


class Cells(nn.Module):
    """A loop over one cell."""

    def __init__(self, kind: str, by_hand: bool = False) -> None:
        super().__init__()
        self.kind, self.by_hand, gates = kind, by_hand, 3 * KINDS[kind][2]
        self.into, self.out = nn.Linear(N, N), nn.Linear(3, CLASSES)
        hand = nn.ModuleList([nn.Linear(N, gates), nn.Linear(3, gates)])
        self.cell = hand if by_hand else KINDS[kind][1](N, 3)  # type: ignore[call-arg]

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(len(x), 3)
        x = torch.tanh(self.into(x))
        for t in range(x.shape[1]):
            if self.by_hand:
                h, c = after(self.kind, self.cell[0](x[:, t]), self.cell[1](h), h, c)  # type: ignore[index]
            elif self.kind == "LSTM":
                h, c = self.cell(x[:, t], (h, c))
            else:
                h = self.cell(x[:, t], h)
        return self.out(h)


def by_hand_in_order(parameters: list[Tensor]) -> list[Tensor]:
    """[weight_ih, weight_hh, bias_ih, bias_hh, …] as those of pairs of linear layers."""
    found = []
    for k in range(0, len(parameters), 4):
        a, b, c, d = parameters[k : k + 4]
        found += [a, c, b, d]
    return found


def core(model: nn.Module) -> list[Tensor]:
    """The parameters in an order that both versions have in common."""
    inner = next(m for name, m in model.named_children() if name in ("attention", "recurrent", "cell"))
    mine = list(inner.parameters())
    recurrent = isinstance(inner, (nn.RNNBase, nn.RNNCellBase))
    return [*(by_hand_in_order(mine) if recurrent else mine), *model.into.parameters(), *model.out.parameters()]  # type: ignore[union-attr, operator]


def matched(fused: nn.Module, by_hand: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Both with the same numbers."""
    with torch.no_grad():
        for a, b in zip(core(fused), core(by_hand), strict=True):
            b.copy_(a)
    return fused, by_hand


Pair = Callable[[], tuple[nn.Module, nn.Module]]
PAIRS: dict[str, Pair] = {
    "tokens first": lambda: matched(Attends("self", batch_first=False), AttendsByHand("self")),
    "tokens first, cross": lambda: matched(Attends("cross", batch_first=False), AttendsByHand("cross")),
    "LSTM, time first": lambda: matched(Recurs("LSTM", 2, 1, batch_first=False), RecursByHand("LSTM", 2, 1)),
}
for _kind in ("self", "cross", "three"):
    PAIRS[f"{_kind} attention"] = lambda kind=_kind: matched(Attends(kind), AttendsByHand(kind))  # type: ignore[misc]
for _kind in KINDS:
    PAIRS[_kind] = lambda kind=_kind: matched(Recurs(kind), RecursByHand(kind))  # type: ignore[misc]
    PAIRS[f"{_kind}, deep"] = lambda kind=_kind: matched(Recurs(kind, 2, 2), RecursByHand(kind, 2, 2))  # type: ignore[misc]
    PAIRS[f"{_kind} cell"] = lambda kind=_kind: matched(Cells(kind), Cells(kind, by_hand=True))  # type: ignore[misc]
