"""Models of tokens: character GPTs, attention over a sequence of keys and values, bags of words."""

from __future__ import annotations

import argparse
import inspect
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt.lab.suite.data import generator, split
from ddpnopt.lab.suite.fully_connected import classifier
from ddpnopt.lab.suite.task import Batch, Setup, Splits, suite_task

CONTEXT = 32


@lru_cache
def source_text() -> tuple[Splits, int, float]:
    """Windows of a standard-library module's text, the number of characters, and the test entropy of their frequencies.

    The text is that of the running Python's `argparse`: compare runs of the same Python version only.
    """
    text = inspect.getsource(argparse)
    alphabet = {character: number for number, character in enumerate(sorted(set(text)))}
    codes = torch.tensor([alphabet[character] for character in text])
    first, second = int(0.8 * len(codes)), int(0.9 * len(codes))

    def windows(part: Tensor, stride: int) -> Batch:
        rows = part.unfold(0, CONTEXT + 1, stride)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    splits = Splits(windows(codes[:first], 7), windows(codes[first:second], CONTEXT), windows(codes[second:], CONTEXT))
    counts = codes[:first].bincount(minlength=len(alphabet)).double() + 1
    chance = -(counts / counts.sum()).log()[splits.test[1]].mean().item()
    return splits, len(alphabet), chance


class CausalBlock(nn.Module):
    """Pre-norm causal attention and a GELU network."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, time, width))
        return x + self.mlp(self.norm2(x))


class CharacterGPT(nn.Module):
    """Two causal blocks; called with targets it returns the loss, as many language models do."""

    def __init__(self, characters: int, width: int = 48, heads: int = 4, tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(characters, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(CausalBlock(width, heads), CausalBlock(width, heads))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, characters, bias=False)
        if tied:
            nn.init.normal_(self.tokens.weight, std=0.1)
            nn.init.normal_(self.positions.weight, std=0.1)
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def next_token_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Nats per token, computed outside the model."""
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def nats(model: nn.Module, data: Batch) -> float:
    """Mean cross-entropy per token."""
    return next_token_loss(model, data).item()


@suite_task("tokens", "nats", "lower", steps=400, batch_size=16)
def gpt_untied() -> Setup:
    """Two blocks on the characters of Python code, the loss outside the model."""
    splits, characters, chance = source_text()
    return Setup(CharacterGPT(characters), splits, next_token_loss, nats, chance)


@suite_task("tokens", "nats", "lower", steps=400, batch_size=16)
def gpt_tied() -> Setup:
    """The head shares the embedding's weight, and the model returns its own loss."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        tokens, targets = batch
        return model(tokens, targets=targets)

    splits, characters, chance = source_text()
    return Setup(CharacterGPT(characters, tied=True), splits, loss, nats, chance)


class KeyValueClassifier(nn.Module):
    """Reads pairs of a key and a value and a query, attends twice, classifies from the query's place."""

    def __init__(self, keys: int, values: int, width: int = 32) -> None:
        super().__init__()
        self.keys = nn.Embedding(keys, width)
        self.values = nn.Embedding(values + 1, width)
        self.attention = nn.ModuleList(nn.MultiheadAttention(width, 2, batch_first=True) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.head = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, values))

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.keys(x[..., 0]) + self.values(x[..., 1])
        for attend, norm in zip(self.attention, self.norms, strict=True):
            h = norm(h + attend(h, h, h, need_weights=False)[0])
        return self.head(h[:, -1])


@suite_task("tokens", "accuracy %", "higher", steps=250, batch_size=32)
def key_value_recall() -> Setup:
    """Twenty-four pairs of key and value, then a key: which value? A tenth of the training labels is random."""
    keys, values, number, length = 32, 12, 5000, 24
    source = generator(10)
    key = torch.rand(number, keys, generator=source).argsort(1)[:, :length]
    value = torch.randint(values, (number, length), generator=source)
    asked = torch.randint(length, (number, 1), generator=source)
    label = value.gather(1, asked)[:, 0]
    pairs = torch.stack([key, value], 2)
    query = torch.stack([key.gather(1, asked), torch.full_like(asked, values)], 2)
    splits = split((torch.cat([pairs, query], 1), label), 400, 600)
    x, y = splits.train
    wrong = torch.rand(len(y), generator=source) < 0.1
    noisy = torch.where(wrong, torch.randint(values, y.shape, generator=source), y)
    return classifier(KeyValueClassifier(keys, values), Splits((x, noisy), splits.validation, splits.test))


class BagOfTokens(nn.Module):
    """Mean embedding, layer norm, one hidden layer."""

    def __init__(self, words: int, classes: int, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.norm = nn.LayerNorm(width)
        self.hidden, self.head = nn.Linear(width, 32), nn.Linear(32, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(F.relu(self.hidden(self.norm(self.embedding(tokens).mean(1)))))


@suite_task("tokens", "accuracy %", "higher", steps=400, batch_size=32)
def bag_of_tokens() -> Setup:
    """Documents of 24 words from class-dependent word frequencies with a long tail of rare words."""
    words, classes, number = 800, 8, 3000
    source = generator(11)
    frequency = 1 / torch.arange(1, words + 1) ** 0.8
    tilt = torch.exp(0.8 * torch.randn(classes, words, generator=source))
    label = torch.randint(classes, (number,), generator=source)
    tokens = torch.multinomial((frequency * tilt)[label], 24, replacement=True, generator=source)
    return classifier(BagOfTokens(words, classes), split((tokens, label), 400, 600))


TASKS = (gpt_untied, gpt_tied, key_value_recall, bag_of_tokens)
