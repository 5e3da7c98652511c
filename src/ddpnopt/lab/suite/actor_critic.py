"""Continuous actions: a Gaussian policy and a value that share their first layers, learned together."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ddpnopt.lab.suite.data import generator, split
from ddpnopt.lab.suite.task import Batch, Setup, suite_task


class ActorCritic(nn.Module):
    """Mean and logarithmic deviation of the action, and the expected reward."""

    def __init__(self, states: int, actions: int, width: int = 64) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(states, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.mean, self.value = nn.Linear(width, actions), nn.Linear(width, 1)
        self.log_deviation = nn.Parameter(torch.full((actions,), -0.5))

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.body(state)
        return self.mean(h), self.log_deviation.exp(), self.value(h)[:, 0]


def reward(action: Tensor, best: Tensor) -> Tensor:
    """1 for the best action, falling with the squared distance from it."""
    return torch.exp(-2 * (action - best).square().sum(1))


@suite_task("reinforcement", "reward %", "higher", steps=800, batch_size=128)
def gaussian_actor_critic() -> Setup:
    """Two numbers to choose for each state: the advantage weighs the log-probability; chance is to do nothing."""
    source = generator(97)
    state = torch.randn(5000, 6, generator=source)
    best = torch.tanh(state @ torch.randn(6, 2, generator=source) / 1.5 + state[:, :2] * state[:, 2:4])
    splits = split((state, best), 600, 1000)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        mean, deviation, value = model(batch[0])
        policy = torch.distributions.Normal(mean, deviation)
        action = policy.sample()
        gain = reward(action, batch[1])
        actor = -((gain - value.detach()) * policy.log_prob(action).sum(1)).mean()
        return actor + 0.5 * (value - gain).square().mean() - 0.003 * policy.entropy().sum(1).mean()

    def measure(model: nn.Module, data: Batch) -> float:
        mean, _, _ = model(data[0])
        return 100 * reward(mean, data[1]).double().mean().item()

    chance = 100 * reward(torch.zeros_like(splits.test[1]), splits.test[1]).mean().item()
    return Setup(ActorCritic(6, 2), splits, loss, measure, chance)


TASKS = (gaussian_actor_critic,)
