"""Models whose inputs or layers do not have the batch in dimension 0."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from data import images, split, tokens
from torch import Tensor, nn
from trial import Trial, case

SHAPES = "batches in other dimensions"


class SequenceFirst(nn.Module):
    """Inputs (time, batch), as in torch's own transformer layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 32)
        self.layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0)
        self.out = nn.Linear(32, 40)

    def forward(self, ids: Tensor) -> Tensor:
        T = len(ids)
        mask = nn.Transformer.generate_square_subsequent_mask(T)
        return self.out(self.layer(self.words(ids), src_mask=mask, is_causal=True))


@case("sequence-first transformer", SHAPES)
def sequence_first() -> Trial:
    model = SequenceFirst()
    batches = [(ids.T.contiguous(),) for (ids,) in split(8, tokens())]
    return Trial(model, lambda ids: F.cross_entropy(model(ids[:-1]).flatten(0, 1), ids[1:].flatten()), batches)


class SequenceFirstClasses(nn.Module):
    """Attention of its own over dimension 0."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.qkv, self.mix, self.out = (
            nn.Embedding(40, 32),
            nn.Linear(32, 96),
            nn.Linear(32, 32),
            nn.Linear(32, 3),
        )

    def forward(self, ids: Tensor) -> Tensor:
        h = self.words(ids)
        q, k, v = self.qkv(h).chunk(3, -1)
        weight = torch.einsum("tbd,sbd->bts", q, k).div(32**0.5).softmax(-1)
        h = h + self.mix(torch.einsum("bts,sbd->tbd", weight, v))
        return self.out(h.mean(0))


@case("sequence-first attention, one class per sequence", SHAPES)
def sequence_first_classes() -> Trial:
    model = SequenceFirstClasses()
    ids = tokens()
    batches = [(a.T.contiguous(), y) for a, y in split(8, ids, ids[:, 0] % 3)]
    return Trial(model, lambda ids, y: F.cross_entropy(model(ids), y), batches)


class FlatTokens(nn.Module):
    """Tokens flattened into dimension 0 between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 32)
        self.first, self.norm, self.second, self.out = (
            nn.Linear(32, 32),
            nn.LayerNorm(32),
            nn.Linear(32, 32),
            nn.Linear(32, 3),
        )

    def forward(self, ids: Tensor) -> Tensor:
        B, T = ids.shape
        h = self.words(ids).reshape(B * T, -1)
        h = self.second(self.norm(self.first(h)).relu())
        return self.out(h.reshape(B, T, -1).mean(1))


@case("tokens flattened into dimension 0", SHAPES)
def flat_tokens() -> Trial:
    model = FlatTokens()
    ids = tokens()
    return Trial(model, lambda ids, y: F.cross_entropy(model(ids), y), split(8, ids, ids[:, 0] % 3))


class Video(nn.Module):
    """Frames folded into the batch for the convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3, padding=1, stride=2), nn.Conv2d(8, 16, 3, padding=1, stride=2)
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        B, T = x.shape[:2]
        h = self.conv2(self.conv1(x.flatten(0, 1)).relu()).relu().mean((2, 3))
        return self.out(h.view(B, T, -1).mean(1))


@case("video, frames in dimension 0", SHAPES)
def video() -> Trial:
    model = Video()
    x, y = images(32, channels=4, size=12)
    return Trial(model, lambda x, y: F.cross_entropy(model(x[:, :, None]), y), split(8, x, y))
