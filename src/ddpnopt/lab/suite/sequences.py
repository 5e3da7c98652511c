"""Sequences of English and of symbols: a rotary transformer, sorting with an encoder and decoder, words, tags."""

from __future__ import annotations

import re
from functools import lru_cache
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt.lab.suite.data import generator, split
from ddpnopt.lab.suite.task import Batch, Setup, Splits, suite_task
from ddpnopt.lab.suite.tokens import nats, next_token_loss


def manual() -> str:
    """The first 150,000 characters of Python's help texts, without indentation; they differ between versions."""
    text = "\n".join(topics[name] for name in sorted(topics))
    return re.sub(r"[ \n]+", " ", text.encode("ascii", "ignore").decode())[:150_000]


def windows(codes: Tensor, context: int, stride: int) -> tuple[Splits, float]:
    """Windows of a text in three parts, and the test cross-entropy of the frequencies in the first part."""
    first, second = int(0.8 * len(codes)), int(0.9 * len(codes))

    def cut(part: Tensor, step: int) -> Batch:
        rows = part.unfold(0, context + 1, step)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    train, test = codes[:first], cut(codes[second:], context)
    counts = train.bincount(minlength=int(codes.max()) + 1).double() + 1
    chance = -(counts / counts.sum()).log()[test[1]].mean().item()
    return Splits(cut(train, stride), cut(codes[first:second], context), test), chance


class RotaryBlock(nn.Module):
    """RMS norm, causal attention with rotated queries and keys, a gated network; no biases."""

    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)
        half = width // heads // 2
        angle = torch.arange(context)[:, None] * 100.0 ** (-torch.arange(half) / half)
        self.cosine: Tensor
        self.sine: Tensor
        self.register_buffer("cosine", angle.cos())
        self.register_buffer("sine", angle.sin())

    def _rotated(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * self.cosine - b * self.sine, a * self.sine + b * self.cosine], -1)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        h = self.norm1(x)
        q, k, v = (f(h).view(batch, time, self.heads, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        attended = F.scaled_dot_product_attention(self._rotated(q), self._rotated(k), v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, time, width))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


@suite_task("tokens", "nats", "lower", steps=400, batch_size=12)
def rotary_characters() -> Setup:
    """Llama's block twice on the characters of Python's manual."""
    context, width = 48, 48
    text = manual()
    alphabet = {character: number for number, character in enumerate(sorted(set(text)))}
    splits, chance = windows(torch.tensor([alphabet[character] for character in text]), context, 11)
    embedding = nn.Embedding(len(alphabet), width)
    nn.init.normal_(embedding.weight, std=0.1)
    blocks = [RotaryBlock(width, 4, context) for _ in range(2)]
    model = nn.Sequential(embedding, *blocks, nn.RMSNorm(width), nn.Linear(width, len(alphabet), bias=False))
    return Setup(model, splits, next_token_loss, nats, chance)


class TiedWords(nn.Module):
    """An LSTM between an embedding and its transpose."""

    def __init__(self, words: int, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        self.layer = nn.LSTM(width, width, batch_first=True)
        self.bias = nn.Parameter(torch.zeros(words))

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.layer(self.embedding(tokens))[0], self.embedding.weight, self.bias)


@lru_cache
def phrases(words: int = 100, number: int = 3000, length: int = 20) -> tuple[Splits, float]:
    """Each word is followed by one of three, which three depends on the sentence's topic; chance is the frequencies."""
    source = generator(99)
    followers = torch.randint(words, (2, words, 3), generator=source)
    topic = torch.randint(2, (number,), generator=source)
    choice = torch.multinomial(torch.tensor([0.7, 0.2, 0.1]).expand(number, -1), length, True, generator=source)
    rows = [torch.randint(words, (number,), generator=source)]
    for t in range(length):
        rows.append(followers[topic, rows[-1], choice[:, t]])
    text = torch.stack(rows, 1)
    splits = split((text[:, :-1].contiguous(), text[:, 1:].contiguous()), 300, 500)
    counts = splits.train[1].flatten().bincount(minlength=words).double() + 1
    return splits, -(counts / counts.sum()).log()[splits.test[1]].mean().item()


@suite_task("recurrent", "nats", "lower", steps=350, batch_size=20)
def tied_words() -> Setup:
    """Sentences of a made-up language of 100 words and two topics."""
    splits, chance = phrases()
    return Setup(TiedWords(100), splits, next_token_loss, nats, chance)


class Sorter(nn.Module):
    """PyTorch's encoder and decoder; the decoder sees what it should have written so far."""

    def __init__(self, symbols: int, length: int, width: int = 32) -> None:
        super().__init__()
        self.symbols = nn.Embedding(symbols + 1, width)
        self.places = nn.Parameter(0.1 * torch.randn(length, width))
        self.body = nn.Transformer(width, 4, 1, 1, 2 * width, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, symbols)
        self.mask: Tensor
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, given: Tensor, written: Tensor) -> Tensor:
        before = self.symbols(written) + self.places
        return self.head(self.body(self.symbols(given) + self.places, before, tgt_mask=self.mask, tgt_is_causal=True))


@suite_task("tokens", "accuracy %", "higher", steps=250, batch_size=64)
def sorting() -> Setup:
    """Twelve symbols out of forty in a secret order; the metric is the share of right symbols, one after the other."""
    symbols, length, number = 40, 12, 5000
    source = generator(88)
    secret = torch.randperm(symbols, generator=source)
    given = torch.randint(symbols, (number, length), generator=source)
    wanted = secret.argsort()[secret[given].sort(1).values]
    written = torch.cat([torch.full((number, 1), symbols), wanted[:, :-1]], 1)
    splits = split((given, written, wanted), 400, 600)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(*batch[:2]).flatten(0, 1), batch[2].flatten())

    def measure(model: nn.Module, data: Batch) -> float:
        return 100 * (model(*data[:2]).argmax(2) == data[2]).double().mean().item()

    chance = 100 * (splits.train[2].mode(0).values == splits.test[2]).double().mean().item()
    return Setup(Sorter(symbols, length), splits, loss, measure, chance)


class Tagger(nn.Module):
    """An embedding, a GRU in both directions, a tag for each word."""

    def __init__(self, words: int, tags: int, hidden: int = 32) -> None:
        super().__init__()
        self.words = nn.Embedding(words, 24)
        self.layer = nn.GRU(24, hidden, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * hidden, tags)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer(self.words(tokens))[0])


PADDING = -100


@lru_cache
def tagged_sentences(words: int = 80, tags: int = 6, number: int = 3000, length: int = 18) -> Splits:
    """The tag depends on the hidden kinds of a word and of both neighbours; sentences of 8 to 18 words, padded."""
    source = generator(89)
    kind = torch.randint(4, (words,), generator=source)
    table = torch.randint(tags, (4, 4, 4), generator=source)
    frequency = 1 / torch.arange(1.0, words + 1) ** 0.7
    tokens = torch.multinomial(frequency.expand(number, -1), length, replacement=True, generator=source)
    around = F.pad(kind[tokens], (1, 1))
    tag = table[around[:, :-2], around[:, 1:-1], around[:, 2:]]
    ends = torch.randint(8, length + 1, (number, 1), generator=source)
    padded = torch.arange(length) >= ends
    return split((tokens.masked_fill(padded, 0), tag.masked_fill(padded, PADDING)), 300, 500)


@suite_task("recurrent", "accuracy %", "higher", steps=300, batch_size=20)
def two_way_tagger() -> Setup:
    """Tags of words in sentences of different length; padding does not count."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        tokens, tag = batch
        return F.cross_entropy(model(tokens).transpose(1, 2), tag, ignore_index=PADDING)

    def measure(model: nn.Module, data: Batch) -> float:
        counted = data[1] != PADDING
        return 100 * (model(data[0]).argmax(2) == data[1])[counted].double().mean().item()

    splits = tagged_sentences()
    tag = splits.test[1][splits.test[1] != PADDING]
    return Setup(Tagger(80, 6), splits, loss, measure, 100 * tag.bincount().max().item() / len(tag))


TASKS = (rotary_characters, tied_words, sorting, two_way_tagger)
