"""Short round trips by a policy that builds them city by city, learned from their length alone."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt.lab.suite.data import generator, split
from ddpnopt.lab.suite.task import Batch, Setup, Splits, suite_task

CITIES = 10


class TourNet(nn.Module):
    """An encoder of cities; from the first and the last city of a tour, where to go next."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.lift = nn.Linear(2, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.query, self.key = nn.Linear(2 * width, width), nn.Linear(width, width)

    def forward(self, place: Tensor) -> tuple[Tensor, Tensor]:
        """Tours that start in each city, as (batch, starts, cities), and the logarithm of their probability."""
        h = self.encoder(self.lift(place))
        key = self.key(h)
        last = first = torch.arange(CITIES).expand(len(h), -1)
        seen = F.one_hot(first, CITIES).bool()
        tour, logs = [first], torch.zeros(len(h), CITIES)
        rows = torch.arange(len(h))[:, None]
        for _ in range(CITIES - 1):
            query = self.query(torch.cat([h[rows, first], h[rows, last]], 2))
            logits = 8 * torch.tanh(query @ key.transpose(1, 2) / math.sqrt(key.shape[2]))
            log = logits.masked_fill(seen, -torch.inf).log_softmax(2)
            chosen = log.argmax(2) if not self.training else torch.multinomial(log.exp().flatten(0, 1), 1).view_as(last)
            logs = logs + log.gather(2, chosen[:, :, None])[:, :, 0]
            seen = seen | F.one_hot(chosen, CITIES).bool()
            last = chosen
            tour.append(chosen)
        return torch.stack(tour, 2), logs


def tour_length(place: Tensor, tour: Tensor) -> Tensor:
    """Of each round trip."""
    visited = place[torch.arange(len(place))[:, None, None], tour]
    return (visited - visited.roll(1, 2)).norm(dim=3).sum(2)


def shortest(place: Tensor) -> Tensor:
    """The length of the best round trip, by dynamic programming over the sets of cities visited after the first."""
    distance = (place[:, :, None] - place[:, None, :]).norm(dim=3)
    others = range(1, CITIES)
    cost = {(1 << city, city): distance[:, 0, city] for city in others}
    for visited in range(2, 1 << CITIES, 2):
        members = [city for city in others if visited >> city & 1]
        for last in members if len(members) > 1 else ():
            before = [cost[visited ^ 1 << last, city] + distance[:, city, last] for city in members if city != last]
            cost[visited, last] = torch.stack(before).amin(0)
    everywhere = (1 << CITIES) - 2
    return torch.stack([cost[everywhere, city] + distance[:, city, 0] for city in others]).amin(0)


@suite_task("reinforcement", "excess length", "lower", steps=200, batch_size=24, sealed=True)
def short_tours() -> Setup:
    """Round trips of ten cities by REINFORCE; the baseline is the mean over the tours from all cities (POMO).

    The metric is how much longer than the shortest tours those of the likeliest choices are, as a share.
    """

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        tour, logs = model(batch[0])
        length = tour_length(batch[0], tour)
        return ((length - length.mean(1, keepdim=True)) * logs).mean()

    def excess(tour: Tensor, data: Batch) -> float:
        place, best = data
        return (tour_length(place, tour) / best[:, None]).mean().item() - 1

    place = torch.rand(6000, CITIES, 2, generator=generator(189))
    parts = split((place,), 400, 800)
    validation, test = ((each[0], shortest(each[0])) for each in (parts.validation, parts.test))
    chance = excess(torch.arange(CITIES).expand(len(test[0]), 1, -1), test)
    splits = Splits(parts.train, validation, test)
    return Setup(TourNet(), splits, loss, lambda net, data: excess(net(data[0])[0], data), chance)


TASKS = (short_tours,)
