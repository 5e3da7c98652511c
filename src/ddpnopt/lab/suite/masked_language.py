"""An encoder that fills in hidden tokens, with RMS norm and gated networks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt.lab.suite.data import generator, split
from ddpnopt.lab.suite.task import Batch, Setup, Splits, suite_task

WORDS, HIDDEN = 60, 60
# Of each sentence this share is hidden.
SHARE = 0.2


def agreeing_sentences(number: int = 5000, length: int = 16) -> Splits:
    """Sentences of a made-up language: a word's kind follows from the last word's, its ending from all before."""
    source = generator(128)
    kinds, endings = 12, 5
    following = torch.randint(kinds, (kinds, 2), generator=source)
    ending = torch.randint(endings, (number,), generator=source)
    kind = torch.randint(kinds, (number,), generator=source)
    words = []
    for _ in range(length):
        words.append(kind * endings + ending)
        choice = (torch.rand(number, generator=source) < 0.3).long()
        kind = following[kind, choice]
        ending = (ending + kind) % endings
    return split((torch.stack(words, 1),), 500, 800)


class GatedEncoder(nn.Module):
    """Attention in both directions and a SwiGLU network, each after RMS norm; no biases."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate_and_up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, time, width))
        gate, up = self.gate_and_up(self.norm2(x)).chunk(2, 2)
        return x + self.down(F.silu(gate) * up)


class MaskedModel(nn.Module):
    """Words and places, two encoder blocks, logits of every word."""

    def __init__(self, length: int = 16, width: int = 48) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS + 1, width)
        self.places = nn.Parameter(0.1 * torch.randn(length, width))
        self.blocks = nn.Sequential(*[GatedEncoder(width, 4) for _ in range(2)])
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.words(tokens) + self.places)))


@suite_task("tokens", "nats", "lower", steps=400, batch_size=32)
def masked_words() -> Setup:
    """A fifth of the words of a sentence is hidden, others each time; chance is their frequencies."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        (words,) = batch
        hidden = torch.rand(words.shape) < SHARE
        logits = model(words.masked_fill(hidden, HIDDEN))
        return F.cross_entropy(logits[hidden], words[hidden])

    splits = agreeing_sentences()
    counts = splits.train[0].flatten().bincount(minlength=WORDS).double() + 1
    chance = -(counts / counts.sum()).log()[splits.test[0]].mean().item()
    return Setup(MaskedModel(), splits, loss, lambda net, data: loss(net, data).item(), chance)


TASKS = (masked_words,)
