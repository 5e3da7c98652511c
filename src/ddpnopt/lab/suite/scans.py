"""Recurrences that could run in parallel: gates that do not see the state (minGRU), and decaying sums (RWKV)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt.lab.suite.data import generator, split
from ddpnopt.lab.suite.task import Batch, Setup, Splits, suite_task
from ddpnopt.lab.suite.tokens import nats, next_token_loss

SYMBOLS, KEPT = 8, 4
# Two further symbols: nothing to keep, and now say the next one.
NOTHING, SAY = SYMBOLS, SYMBOLS + 1


class MinimalGRU(nn.Module):
    """The state moves to a candidate as far as a gate says; both come from the input alone."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate, self.candidate = nn.Linear(width, inner), nn.Linear(width, inner)
        self.out = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        gate, candidate = torch.sigmoid(self.gate(h)), self.candidate(h)
        state = torch.zeros_like(candidate[:, 0])
        states = []
        for keep, new in zip((1 - gate).unbind(1), (gate * candidate).unbind(1), strict=True):
            state = keep * state + new
            states.append(state)
        return x + self.out(torch.stack(states, 1))


def scattered_symbols(number: int = 5000, length: int = 16) -> Splits:
    """Four symbols among nothings, then four times to say one: they are wanted in their order."""
    source = generator(162)
    wanted = torch.randint(SYMBOLS, (number, KEPT), generator=source)
    places = torch.rand(number, length, generator=source).argsort(1)[:, :KEPT].sort(1).values
    given = torch.full((number, length), NOTHING).scatter(1, places, wanted)
    return split((F.pad(given, (0, KEPT), value=SAY), wanted), 500, 900)


@suite_task("recurrent", "accuracy %", "higher", steps=500, batch_size=64, sealed=True)
def min_gru_copying() -> Setup:
    """Selective copying by two layers of minGRU and a network between them; the share of right symbols."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0])[:, -KEPT:].flatten(0, 1), batch[1].flatten())

    def measure(model: nn.Module, data: Batch) -> float:
        return 100 * (model(data[0])[:, -KEPT:].argmax(2) == data[1]).double().mean().item()

    width = 32
    model = nn.Sequential(
        nn.Embedding(SYMBOLS + 2, width),
        MinimalGRU(width, 64),
        nn.Linear(width, width),
        nn.GELU(),
        MinimalGRU(width, 64),
        nn.LayerNorm(width),
        nn.Linear(width, SYMBOLS),
    )
    return Setup(model, scattered_symbols(), loss, measure, chance=100 / SYMBOLS)


def shifted(x: Tensor) -> Tensor:
    """What came one step before."""
    return F.pad(x, (0, 0, 1, 0))[:, :-1]


class TimeMix(nn.Module):
    """RWKV's memory: a mean of past values whose weights decay, let through by a gate."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.share = nn.Parameter(torch.linspace(0, 1, width).repeat(3, 1))
        self.decay = nn.Parameter(torch.linspace(-3, 1, width))
        self.bonus = nn.Parameter(torch.zeros(width))
        self.key, self.value, self.gate = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        before = shifted(h)
        k, v, r = (
            layer(h * share + before * (1 - share))
            for layer, share in zip((self.key, self.value, self.gate), self.share, strict=True)
        )
        weight, decay, bonus = torch.exp(k.clamp_max(20)), torch.exp(-torch.exp(self.decay)), self.bonus.exp()
        above = below = torch.zeros_like(v[:, 0])
        found = []
        for w, value in zip(weight.unbind(1), v.unbind(1), strict=True):
            found.append((above + bonus * w * value) / (below + bonus * w + 1e-6))
            above, below = decay * above + w * value, decay * below + w
        return x + self.out(torch.sigmoid(r) * torch.stack(found, 1))


class ChannelMix(nn.Module):
    """RWKV's network: squares of ReLUs behind a gate."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.share = nn.Parameter(torch.linspace(0, 1, width))
        self.key, self.value = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width, bias=False)
        self.gate = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        mixed = h * self.share + shifted(h) * (1 - self.share)
        return x + torch.sigmoid(self.gate(mixed)) * self.value(F.relu(self.key(mixed)) ** 2)


def brackets(number: int = 3000, length: int = 24, kinds: int = 4) -> Splits:
    """Nested brackets of four kinds, at most five deep: what closes must fit what was opened."""
    source = generator(163)
    draws = torch.rand(number, length + 1, generator=source).tolist()
    kind = torch.multinomial(torch.tensor([0.4, 0.3, 0.2, 0.1]).expand(number, -1), length + 1, True, generator=source)
    rows = []
    for row, chosen in zip(draws, kind.tolist(), strict=True):
        stack: list[int] = []
        text = []
        for draw, opening in zip(row, chosen, strict=True):
            if not stack or (draw < 0.45 and len(stack) < 5):
                stack.append(opening)
                text.append(opening)
            else:
                text.append(kinds + stack.pop())
        rows.append(text)
    text_of = torch.tensor(rows)
    return split((text_of[:, :-1].contiguous(), text_of[:, 1:].contiguous()), 300, 600)


@suite_task("recurrent", "nats", "lower", steps=400, batch_size=24, sealed=True)
def rwkv_brackets() -> Setup:
    """The next bracket by two blocks of RWKV; chance is the frequencies."""
    splits = brackets()
    width = 32
    blocks = [block for _ in range(2) for block in (TimeMix(width), ChannelMix(width))]
    embedding = nn.Embedding(8, width)
    nn.init.normal_(embedding.weight, std=0.3)
    model = nn.Sequential(embedding, nn.LayerNorm(width), *blocks, nn.LayerNorm(width), nn.Linear(width, 8, bias=False))
    counts = splits.train[1].flatten().bincount(minlength=8).double()
    chance = -(counts / counts.sum()).log()[splits.test[1]].mean().item()
    return Setup(model, splits, next_token_loss, nats, chance)


TASKS = (min_gru_copying, rwkv_brackets)
