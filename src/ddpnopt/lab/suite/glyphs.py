"""Characters of made-up scripts, of which some are never seen in training: angular margins, few-shot episodes."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt.lab.suite.data import generator
from ddpnopt.lab.suite.task import Batch, Setup, Splits, suite_task

SEEN, SIZE = 60, 12
EACH = 40


@lru_cache
def characters(classes: int = 120) -> Tensor:
    """Pictures (classes, 40, 12, 12): three strokes per character, each time written a little otherwise."""
    source = generator(184)
    ends = 0.75 * (2 * torch.rand(classes, 1, 3, 2, 2, generator=source) - 1)
    bend = 0.6 * torch.randn(classes, 1, 3, 1, 2, generator=source)
    ends = ends + 0.1 * torch.randn(classes, EACH, 3, 2, 2, generator=source)
    shift = 0.1 * torch.randn(classes, EACH, 1, 1, 2, generator=source)
    share = torch.linspace(0, 1, 12)[:, None]
    way = ends[:, :, :, :1] * (1 - share) + ends[:, :, :, 1:] * share + bend * share * (1 - share) + shift
    axis = torch.linspace(-1, 1, SIZE)
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), 2).view(1, -1, 2)
    points = way.reshape(classes * EACH, -1, 2)
    distance = torch.cdist(grid.expand(len(points), -1, -1), points).amin(2)
    ink = torch.exp(-((distance / 0.15) ** 2)).view(classes, EACH, SIZE, SIZE)
    return ink + 0.15 * torch.randn(ink.shape, generator=source)


def known_and_new() -> Splits:
    """Pictures with their characters: 60 for training, 30 others for validation and 30 for testing."""
    pictures = characters()[:, :, None]

    def part(first: int, last: int) -> Batch:
        return pictures[first:last].flatten(0, 1), torch.arange(last - first).repeat_interleave(EACH)

    return Splits(part(0, SEEN), part(SEEN, 90), part(90, 120))


def nearest_is_same(code: Tensor, label: Tensor) -> float:
    """How often the vector at the smallest angle is of the same character, in percent."""
    code = F.normalize(code, dim=1)
    nearest = (code @ code.T).fill_diagonal_(-2).argmax(1)
    return 100 * (label[nearest] == label).double().mean().item()


def encoder(width: int, outputs: int) -> nn.Sequential:
    """Two strided convolutions with batch norm and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, 2, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, 2, padding=1),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * width * 9, outputs),
    )


class ArcFace(nn.Module):
    """Vectors of length one; called with labels it returns the cosines to the classes, the right angle made larger."""

    def __init__(self, classes: int, width: int = 24, margin: float = 0.3, scale: float = 12.0) -> None:
        super().__init__()
        self.encoder = encoder(12, width)
        self.classes = nn.Parameter(torch.randn(classes, width))
        self.margin, self.scale = margin, scale

    def forward(self, x: Tensor, label: Tensor | None = None) -> Tensor:
        code = F.normalize(self.encoder(x), dim=1)
        if label is None:
            return code
        cosine = code @ F.normalize(self.classes, dim=1).T
        angle = cosine.clamp(-1 + 1e-6, 1 - 1e-6).acos() + self.margin * F.one_hot(label, len(self.classes))
        return self.scale * angle.clamp_max(math.pi).cos()


@suite_task("embeddings", "accuracy %", "higher", steps=300, batch_size=64, sealed=True)
def arcface_characters() -> Setup:
    """Angular margins for 60 characters; measured on 30 others: is the nearest of all the same character?"""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0], batch[1]), batch[1])

    def measure(model: nn.Module, data: Batch) -> float:
        return nearest_is_same(model(data[0]), data[1])

    return Setup(ArcFace(SEEN), known_and_new(), loss, measure, chance=100 / 30)


WAYS, SHOTS, ASKED = 5, 2, 4


def episodes(number: int, first: int, last: int, source: torch.Generator) -> Tensor:
    """Five characters each: two pictures to learn from and four to be named."""
    pictures = characters()
    kind = first + torch.rand(number, last - first, generator=source).argsort(1)[:, :WAYS]
    copy = torch.rand(number, WAYS, EACH, generator=source).argsort(2)[:, :, : SHOTS + ASKED]
    return pictures[kind[:, :, None], copy]


@suite_task("embeddings", "accuracy %", "higher", steps=250, batch_size=4, sealed=True)
def prototypes() -> Setup:
    """Prototypical networks: four episodes per batch; the characters of the held-out episodes are new."""

    def logits(model: nn.Module, batch: Batch) -> Tensor:
        (x,) = batch
        code = model(x.reshape(-1, 1, SIZE, SIZE)).view(len(x), WAYS, SHOTS + ASKED, -1)
        prototype = code[:, :, :SHOTS].mean(2)
        asked = code[:, :, SHOTS:].flatten(1, 2)
        return -(asked[:, :, None] - prototype[:, None]).square().sum(3)

    def wanted(batch: Batch) -> Tensor:
        return torch.arange(WAYS).repeat_interleave(ASKED).expand(len(batch[0]), -1)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(logits(model, batch).flatten(0, 1), wanted(batch).flatten())

    def measure(model: nn.Module, data: Batch) -> float:
        return 100 * (logits(model, data).argmax(2) == wanted(data)).double().mean().item()

    source = generator(185)
    ranges = ((1200, 0, SEEN), (80, SEEN, 90), (160, 90, 120))
    train, validation, test = ((episodes(*each, source),) for each in ranges)
    return Setup(encoder(12, 24), Splits(train, validation, test), loss, measure, chance=100 / WAYS)


TASKS = (arcface_characters, prototypes)
