"""Learning from rewards: Q-learning from fixed transitions of a grid, policies for a bandit."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt.lab.suite.data import flat_digits, generator
from ddpnopt.lab.suite.fully_connected import dense
from ddpnopt.lab.suite.task import Batch, Setup, Splits, suite_task

SIZE = 8
DISCOUNT = 0.95
HORIZON = 40
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


def discounted_return(policy: Tensor, starts: Tensor) -> float:
    """Mean return in percent of following `policy` (moves by cell, one column per rollout) from each start."""
    following, _ = grid()
    cells, reward = starts.clone(), torch.zeros(len(starts))
    goal = GOAL[0] * SIZE + GOAL[1]
    for time in range(HORIZON):
        arrived = cells == goal
        cells = torch.where(arrived, cells, following[cells, policy[cells, torch.arange(len(starts))]])
        reward += (~arrived & (cells == goal)) * DISCOUNT**time
    return 100 * reward.mean().item()


@suite_task("reinforcement", "return %", "higher", steps=1000, batch_size=64)
def q_learning() -> Setup:
    """One-step Q-learning from the transitions of a random policy; the target is the network itself."""
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

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        state, action, reward, next_state, end = batch
        with torch.no_grad():
            target = reward + DISCOUNT * (1 - end) * model(next_state).max(1).values
        value = model(state).gather(1, action[:, None])[:, 0]
        return F.smooth_l1_loss(value, target)

    def greedy_return(model: nn.Module, data: Batch) -> float:
        moves = model(everywhere).argmax(1)
        return discounted_return(moves[:, None].expand(-1, len(data[0])), data[0])

    half = len(order) // 2
    random_moves = torch.randint(4, (SIZE * SIZE, len(order)), generator=source)
    chance = discounted_return(random_moves, order)
    splits = Splits(train, (order[:half],), (order[half:],))
    return Setup(dense([8, 64, 64, 4]), splits, loss, greedy_return, chance)


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


@suite_task("reinforcement", "reward %", "higher", steps=400, batch_size=64, sealed=True)
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
