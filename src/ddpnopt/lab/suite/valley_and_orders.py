"""Decisions from a fixed record: a car in a valley by double Q-learning, orders weighted by what they gained."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt.lab.suite.data import generator, split
from ddpnopt.lab.suite.fully_connected import dense
from ddpnopt.lab.suite.task import Batch, Setup, Splits, suite_task

DISCOUNT = 0.96
FOLLOWING = 0.05
HORIZON = 80


def drive(state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """Place and speed of a car in a valley after pushing left, not at all or right; whether it is on top."""
    place, speed = state.unbind(1)
    speed = (speed + 0.15 * (action - 1) - 0.25 * torch.cos(3 * place)).clamp(-1, 1)
    place = place + 0.15 * speed
    speed = torch.where(place < -1.2, torch.zeros_like(speed), speed)
    place = place.clamp(-1.2, 0.6)
    return torch.stack([place, speed], 1), place >= 0.5


def anywhere(number: int, source: torch.Generator) -> Tensor:
    """Cars at random places below the top, at random speed."""
    return torch.rand(number, 2, generator=source) * torch.tensor([1.6, 1.6]) - torch.tensor([1.2, 0.8])


def discounted(value: nn.Module | None, state: Tensor) -> float:
    """Mean of the discount to the power of the time to the top, in percent; without a network by pushing at random."""
    total, running = torch.zeros(len(state)), torch.ones(len(state))
    for time in range(HORIZON):
        action = torch.randint(3, (len(state),)) if value is None else value(state).argmax(1)
        state, arrived = drive(state, action)
        total = total + running * arrived * DISCOUNT**time
        running = running * ~arrived
    return 100 * total.mean().item()


class Dueling(nn.Module):
    """The value of a state and the advantage of each action over their mean."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.value, self.advantage = nn.Linear(width, 1), nn.Linear(width, 3)

    def forward(self, state: Tensor) -> Tensor:
        h = self.body(state * torch.tensor([1.5, 2.0]))
        advantage = self.advantage(h)
        return self.value(h) + advantage - advantage.mean(1, keepdim=True)


@suite_task("reinforcement", "return %", "higher", steps=500, batch_size=128, sealed=True)
def double_q_valley() -> Setup:
    """Up a hill that is too steep: the network chooses the next action, a slow copy says what it is worth."""
    source = generator(187)
    state = anywhere(8000, source)
    action = torch.randint(3, (8000,), generator=source)
    after, arrived = drive(state, action)
    online = Dueling()
    slow = copy.deepcopy(online)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        before, taken, then, done = batch
        with torch.no_grad():
            for follower, leader in zip(slow.parameters(), model.parameters(), strict=True):
                follower.lerp_(leader, FOLLOWING)
            best = model(then).argmax(1, keepdim=True)
            onwards = slow(then).gather(1, best)[:, 0]
            target = torch.where(done, torch.ones_like(onwards), DISCOUNT * onwards)
        return F.mse_loss(model(before).gather(1, taken[:, None])[:, 0], target)

    splits = Splits((state, action, after, arrived), (anywhere(500, source),), (anywhere(1000, source),))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(187)
        chance = discounted(None, splits.test[0])
    return Setup(online, splits, loss, lambda net, data: discounted(net, data[0]), chance)


PRICE, COST = 3.0, 1.0


class Buyer(nn.Module):
    """Mean and deviation of an order, and the gain to be expected."""

    def __init__(self, inputs: int, width: int = 48) -> None:
        super().__init__()
        self.policy, self.value = dense([inputs, width, width, 2], nn.Tanh), dense([inputs, width, width, 1], nn.Tanh)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, spread = self.policy(x).unbind(1)
        return mean, F.softplus(spread) + 0.05, self.value(x)[:, 0]


@suite_task("reinforcement", "gain %", "higher", steps=600, batch_size=128, sealed=True)
def advantage_weighted_orders() -> Setup:
    """How much to order before the demand is known, from a log of careless orders: the better a logged order
    did than expected, the more it is copied. The gain is a share of what foresight would earn; chance is the log's.
    """
    source = generator(188)
    x = torch.randn(9000, 8, generator=source)
    level = 1 + 0.5 * torch.sin(2 * x[:, 0]) + 0.4 * x[:, 1] * x[:, 2] + 0.3 * x[:, 3]
    demand = (level + 0.25 * torch.randn(9000, generator=source)).clamp_min(0)
    order = (0.8 + 0.2 * x[:, 3] + 0.7 * torch.randn(9000, generator=source)).clamp_min(0)
    parts = split((x, demand, order), 1000, 2000)

    def gain(amount: Tensor, wanted: Tensor) -> Tensor:
        return PRICE * torch.minimum(amount, wanted) - COST * amount

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x, earned, taken = batch
        mean, deviation, expected = model(x)
        advantage = (earned - expected).detach()
        weight = torch.exp(advantage / 0.4).clamp_max(10)
        cloned = -(weight * torch.distributions.Normal(mean, deviation).log_prob(taken)).mean()
        return cloned + (expected - earned).square().mean()

    def share(amount: Tensor, wanted: Tensor) -> float:
        best = (PRICE - COST) * wanted.mean()
        return min(max(100 * (gain(amount, wanted).mean() / best).item(), 0.0), 100.0)

    x, wanted, taken = parts.train
    splits = Splits((x, gain(taken, wanted), taken), parts.validation, parts.test)
    chance = share(parts.test[2], parts.test[1])
    return Setup(Buyer(8), splits, loss, lambda net, data: share(net(data[0])[0].clamp_min(0), data[1]), chance)


TASKS = (double_q_valley, advantage_weighted_orders)
