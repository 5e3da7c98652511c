"""Vectors of words and of things: neighbours against random words, and facts against wrong facts."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt.lab.suite.data import generator, split
from ddpnopt.lab.suite.sequences import phrases
from ddpnopt.lab.suite.task import Batch, Setup, Splits, suite_task

WRONG = 5


def neighbours(words: int = 200) -> tuple[Splits, Tensor]:
    """Words of a made-up language with the next and the one after it, and how often each word is drawn as wrong."""
    parts, _ = phrases(words)

    def pairs(data: Batch) -> Batch:
        text, following = data
        return torch.cat([text.flatten(), text[:, :-1].flatten()]), torch.cat(
            [following.flatten(), following[:, 1:].flatten()]
        )

    splits = Splits(pairs(parts.train), pairs(parts.validation), pairs(parts.test))
    return splits, splits.train[1].bincount(minlength=words).float() ** 0.75


class SkipGram(nn.Module):
    """A vector of each word, and another one for when it is a neighbour."""

    def __init__(self, words: int, width: int = 16) -> None:
        super().__init__()
        self.centre, self.around = nn.Embedding(words, width), nn.Embedding(words, width)
        nn.init.normal_(self.centre.weight, std=0.2)
        nn.init.normal_(self.around.weight, std=0.2)

    def forward(self, word: Tensor, others: Tensor) -> Tensor:
        return (self.around(others) @ self.centre(word)[:, :, None])[:, :, 0]


@suite_task("embeddings", "nats", "lower", steps=900, batch_size=256)
def skip_grams() -> Setup:
    """Neighbours of a word against five words at random (word2vec); chance is to know nothing of the words."""
    splits, often = neighbours()

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        word, near = batch
        wrong = torch.multinomial(often, len(word) * WRONG, replacement=True).view(-1, WRONG)
        score = model(word, torch.cat([near[:, None], wrong], 1))
        return -(F.logsigmoid(score[:, 0]) + F.logsigmoid(-score[:, 1:]).sum(1)).mean()

    share = torch.tensor(1 / (1 + WRONG))
    chance = -(share.log() + WRONG * (1 - share).log()).item()
    return Setup(SkipGram(len(often)), splits, loss, lambda net, data: loss(net, data).item(), chance)


@lru_cache
def facts(things: int = 150, relations: int = 6) -> Splits:
    """Facts (thing, relation, thing): for each thing and relation the best four of a hidden bilinear score."""
    source = generator(142)
    hidden = torch.randn(things, 3, generator=source)
    maps = torch.randn(relations, 3, 3, generator=source)
    score = torch.einsum("hi,rij,tj->hrt", hidden, maps, hidden)
    best = score.topk(4, 2).indices
    head, relation = torch.meshgrid(torch.arange(things), torch.arange(relations), indexing="ij")
    rows = [tensor[..., None].expand_as(best).flatten() for tensor in (head, relation)]
    return split((*rows, best.flatten()), 400, 700)


class FactScore(nn.Module):
    """ComplEx: the score of all things as the tail of a fact, from complex vectors as pairs of real ones."""

    def __init__(self, things: int, relations: int, width: int = 24) -> None:
        super().__init__()
        self.things, self.relations = nn.Embedding(things, 2 * width), nn.Embedding(relations, 2 * width)
        nn.init.normal_(self.things.weight, std=0.3)
        nn.init.normal_(self.relations.weight, std=0.3)

    def forward(self, head: Tensor, relation: Tensor) -> Tensor:
        a, b = self.things(head).chunk(2, 1)
        c, d = self.relations(relation).chunk(2, 1)
        return torch.cat([a * c - b * d, a * d + b * c], 1) @ self.things.weight.T


def reciprocal_rank(model: nn.Module, data: Batch) -> float:
    """Mean of one over the place of the right thing, in percent."""
    score = model(data[0], data[1])
    place = 1 + (score > score.gather(1, data[2][:, None])).sum(1)
    return 100 * (1 / place.double()).mean().item()


@suite_task("embeddings", "reciprocal rank %", "higher", steps=900, batch_size=64)
def knowledge_graph() -> Setup:
    """Facts that are missing from a graph of 150 things and six relations; chance is a random order."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0], batch[1]), batch[2])

    chance = 100 * (1 / torch.arange(1.0, 151)).mean().item()
    return Setup(FactScore(150, 6), facts(), loss, reciprocal_rank, chance)


TASKS = (skip_grams, knowledge_graph)
