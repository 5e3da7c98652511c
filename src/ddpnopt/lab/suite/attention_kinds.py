"""Transformers of other kinds: attention without softmax, and relative places in an encoder with a decoder (T5)."""

from __future__ import annotations

import _pydecimal
import inspect

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt.lab.suite.data import generator, split
from ddpnopt.lab.suite.sequences import windows
from ddpnopt.lab.suite.task import Batch, Setup, Splits, suite_task
from ddpnopt.lab.suite.tokens import nats, next_token_loss


class LinearAttention(nn.Module):
    """Positive features of queries and keys in place of a softmax, causal; then a GELU network."""

    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))
        self.past: Tensor
        self.register_buffer("past", torch.ones(context, context).tril())

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        weight = (F.elu(q) + 1) @ (F.elu(k) + 1).transpose(2, 3) * self.past
        attended = weight @ v / (weight.sum(3, keepdim=True) + 1e-6)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, time, width))
        return x + self.mlp(self.norm2(x))


class Placed(nn.Module):
    """Vectors of characters and of places."""

    def __init__(self, characters: int, context: int, width: int) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(characters, width), nn.Embedding(context, width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.characters(tokens) + self.places.weight[: tokens.shape[1]]


@suite_task("tokens", "nats", "lower", steps=350, batch_size=16, sealed=True)
def linear_attention_code() -> Setup:
    """The characters of Python's module of decimal numbers, by two blocks of linear attention."""
    context, width = 32, 48
    text = inspect.getsource(_pydecimal)[:100_000]
    alphabet = {character: number for number, character in enumerate(sorted(set(text)))}
    splits, chance = windows(torch.tensor([alphabet[character] for character in text]), context, 9)
    model = nn.Sequential(
        Placed(len(alphabet), context, width),
        *[LinearAttention(width, 4, context) for _ in range(2)],
        nn.LayerNorm(width),
        nn.Linear(width, len(alphabet)),
    )
    return Setup(model, splits, next_token_loss, nats, chance)


class RelativeAttention(nn.Module):
    """Attention of one sequence to another, with a learned bias by how far apart the places are; no scale."""

    def __init__(self, width: int, heads: int, longest: int, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.longest, self.causal = heads, longest, causal
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        nn.init.normal_(self.query.weight, std=1 / width)
        self.bias = nn.Embedding(2 * longest - 1, heads)
        nn.init.normal_(self.bias.weight, std=0.1)

    def forward(self, x: Tensor, read: Tensor) -> Tensor:
        q, k, v = (
            layer(source).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for layer, source in ((self.query, x), (self.key, read), (self.value, read))
        )
        apart = torch.arange(read.shape[1]) - torch.arange(x.shape[1])[:, None]
        logits = q @ k.transpose(2, 3) + self.bias(apart + self.longest - 1).permute(2, 0, 1)
        if self.causal:
            logits = logits.masked_fill(apart > 0, -torch.inf)
        return self.out((logits.softmax(3) @ v).transpose(1, 2).flatten(2))


class T5Block(nn.Module):
    """Attention to itself, where wanted to what was read, and a ReLU network, each after RMS norm."""

    def __init__(self, width: int, longest: int, writes: bool) -> None:
        super().__init__()
        self.norm1, self.own = nn.RMSNorm(width), RelativeAttention(width, 4, longest, causal=writes)
        self.norm2 = nn.RMSNorm(width) if writes else None
        self.other = RelativeAttention(width, 4, longest) if writes else None
        self.norm3 = nn.RMSNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width, bias=False), nn.ReLU(), nn.Linear(2 * width, width, bias=False)
        )

    def forward(self, x: Tensor, read: Tensor | None = None) -> Tensor:
        h = self.norm1(x)
        x = x + self.own(h, h)
        if self.norm2 is not None and self.other is not None and read is not None:
            x = x + self.other(self.norm2(x), read)
        return x + self.mlp(self.norm3(x))


class SmallT5(nn.Module):
    """A block that reads and one that writes, with one table of symbols, also for the outputs."""

    def __init__(self, symbols: int, longest: int, width: int = 48) -> None:
        super().__init__()
        self.symbols = nn.Embedding(symbols, width)
        self.reader = T5Block(width, longest, writes=False)
        self.read_norm, self.norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.writer = T5Block(width, longest, writes=True)

    def forward(self, given: Tensor, written: Tensor) -> Tensor:
        read = self.read_norm(self.reader(self.symbols(given)))
        h = self.norm(self.writer(self.symbols(written), read))
        return F.linear(h * h.shape[2] ** -0.5, self.symbols.weight)


WORDS, LENGTH = 40, 8


def translated(number: int = 5000) -> Splits:
    """Sentences of eight words and their translation, in which each word has another name and some change places.

    The first fifteen words are adjectives, which go behind the noun after them. Writing starts with a word of its own.
    """
    source = generator(166)
    given = torch.randint(WORDS, (number, LENGTH), generator=source)
    dictionary = torch.randperm(WORDS, generator=source)
    wanted = given.clone()
    for place in reversed(range(LENGTH - 1)):
        pair = wanted[:, place : place + 2].clone()
        swapped = (pair[:, :1] < 15) & (pair[:, 1:] >= 15)
        wanted[:, place : place + 2] = torch.where(swapped, pair.flip(1), pair)
    wanted = dictionary[wanted]
    written = torch.cat([torch.full((number, 1), WORDS), wanted[:, :-1]], 1)
    return split((given, written, wanted), 500, 1000)


@suite_task("tokens", "accuracy %", "higher", steps=400, batch_size=32, sealed=True)
def t5_translation() -> Setup:
    """A made-up translation by an encoder and a decoder with relative places; the share of right words."""
    splits = translated()

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(*batch[:2]).flatten(0, 1), batch[2].flatten())

    def measure(model: nn.Module, data: Batch) -> float:
        return 100 * (model(*data[:2]).argmax(2) == data[2]).double().mean().item()

    return Setup(SmallT5(WORDS + 1, LENGTH), splits, loss, measure, chance=100 / WORDS)


TASKS = (linear_attention_code, t5_translation)
