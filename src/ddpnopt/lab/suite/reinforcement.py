"""Learning from rewards: Q-learning from fixed transitions of a grid, policies for a bandit."""

from __future__ import annotations

import copy
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt.lab.suite.data import flat_digits, generator
from ddpnopt.lab.suite.fully_connected import dense
from ddpnopt.lab.suite.task import Batch, Setup, Splits, suite_task

SIZE = 8
DISCOUNT = 0.95
# Share of random moves when a policy is measured: a greedy policy that walks in circles would earn nothing at all.
EXPLORATION = 0.1
# How far the slow copy of a Q-network moves to the trained one per loss.
FOLLOWING = 0.05
GOAL = (SIZE - 1, SIZE - 1)
# Two walls with one gap each: the shortest way winds.
WALLS = {(2, column) for column in range(SIZE - 1)} | {(5, column) for column in range(1, SIZE)}
MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))


@lru_cache
def grid() -> tuple[Tensor, Tensor]:
    """Where each of the four moves leads from each cell, and whether a cell is free."""
    following = torch.zeros(SIZE * SIZE, 4, dtype=torch.long)
    free = torch.ones(SIZE * SIZE, dtype=torch.bool)
    for row in range(SIZE):
        for column in range(SIZE):
            cell = row * SIZE + column
            free[cell] = (row, column) not in WALLS and (row, column) != GOAL
            for move, (down, right) in enumerate(MOVES):
                place = (row + down, column + right)
                inside = 0 <= place[0] < SIZE and 0 <= place[1] < SIZE and place not in WALLS
                following[cell, move] = place[0] * SIZE + place[1] if inside else cell
    return following, free


def features(cells: Tensor) -> Tensor:
    """What the network sees: row and column as numbers in [-1, 1] and their waves."""
    place = torch.stack([cells // SIZE, cells % SIZE], -1) * (2 / (SIZE - 1)) - 1
    return torch.cat([place, torch.sin(3 * place), torch.cos(3 * place), torch.sin(6 * place)], -1)


def expected_return(policy: Tensor, starts: Tensor) -> float:
    """Mean discounted return in percent, from the Bellman equation of the policy's probabilities (cells x moves)."""
    following, _ = grid()
    goal = GOAL[0] * SIZE + GOAL[1]
    onwards = torch.zeros(SIZE * SIZE, SIZE * SIZE).scatter_add(1, following, policy)
    reward = onwards[:, goal].clone()
    onwards[:, goal] = 0.0
    value = torch.linalg.solve(torch.eye(SIZE * SIZE) - DISCOUNT * onwards, reward)
    return 100 * value[starts].mean().item()


@suite_task("reinforcement", "return %", "higher", steps=500, batch_size=64)
def q_learning() -> Setup:
    """One-step Q-learning from the transitions of a random policy; the target comes from a slow copy of the network.

    Measured from starting cells that differ between validation and test.
    """
    following, free = grid()
    source = generator(70)
    cells = free.nonzero()[:, 0]
    goal = GOAL[0] * SIZE + GOAL[1]
    start = cells[torch.randint(len(cells), (2000,), generator=source)]
    move = torch.randint(4, (2000,), generator=source)
    after = following[start, move]
    done = (after == goal).float()
    train = features(start), move, done, features(after), done
    order = cells[torch.randperm(len(cells), generator=source)]
    everywhere = features(torch.arange(SIZE * SIZE))

    online = dense([8, 64, 64, 4])
    slow = copy.deepcopy(online)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        state, action, reward, next_state, end = batch
        with torch.no_grad():
            for follower, leader in zip(slow.parameters(), model.parameters(), strict=True):
                follower.lerp_(leader, FOLLOWING)
            target = reward + DISCOUNT * (1 - end) * slow(next_state).max(1).values
        value = model(state).gather(1, action[:, None])[:, 0]
        return F.smooth_l1_loss(value, target)

    def explored_return(model: nn.Module, data: Batch) -> float:
        greedy = F.one_hot(model(everywhere).argmax(1), 4).float()
        return expected_return((1 - EXPLORATION) * greedy + EXPLORATION / 4, data[0])

    half = len(order) // 2
    chance = expected_return(torch.full((SIZE * SIZE, 4), 0.25), order[half:])
    splits = Splits(train, (order[:half],), (order[half:],))
    return Setup(online, splits, loss, explored_return, chance)


def expected_reward(model: nn.Module, data: Batch) -> float:
    """Probability of the rewarded action in percent."""
    x, y = data
    return 100 * model(x).softmax(1).gather(1, y[:, None]).double().mean().item()


@suite_task("reinforcement", "reward %", "higher", steps=600, batch_size=64)
def policy_gradient() -> Setup:
    """A bandit that shows a digit and rewards its name: REINFORCE with a baseline and an entropy bonus."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x, y = batch
        policy = torch.distributions.Categorical(logits=model(x))
        action = policy.sample()
        reward = (action == y).float()
        return -((reward - reward.mean()) * policy.log_prob(action)).mean() - 0.01 * policy.entropy().mean()

    return Setup(dense([64, 64, 10]), flat_digits(0.2), loss, expected_reward, chance=10.0)


@suite_task("reinforcement", "reward %", "higher", steps=400, batch_size=64)
def logged_bandit() -> Setup:
    """The same bandit from logged actions of a random policy, each four times: importance-weighted reward."""
    splits = flat_digits(0.2)
    source = generator(71)
    x, y = (tensor.repeat(4, *[1] * (tensor.dim() - 1)) for tensor in splits.train)
    action = torch.randint(10, y.shape, generator=source)
    reward = (action == y).float()

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        state, taken, gain = batch
        probability = model(state).softmax(1).gather(1, taken[:, None])[:, 0]
        return -((gain - 0.1) * probability / 0.1).mean()

    return Setup(
        dense([64, 64, 10]), Splits((x, action, reward), splits.validation, splits.test), loss, expected_reward, 10.0
    )


TASKS = (q_learning, policy_gradient, logged_bandit)
