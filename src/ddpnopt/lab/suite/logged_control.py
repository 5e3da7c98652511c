"""Learning to act from what others did: a policy within bounds of the one that acted, and a controller to be copied."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt.lab.suite.data import flat_digits, generator
from ddpnopt.lab.suite.fully_connected import dense
from ddpnopt.lab.suite.reinforcement import expected_reward
from ddpnopt.lab.suite.task import Batch, Setup, Splits, suite_task

CLIP = 0.2


@suite_task("reinforcement", "reward %", "higher", steps=400, batch_size=64)
def clipped_surrogate() -> Setup:
    """PPO's clipped surrogate: digits are to be named, the log is of a policy that is often wrong."""
    splits = flat_digits(0.3)
    source = generator(143)
    x, y = (tensor.repeat(3, *[1] * (tensor.dim() - 1)) for tensor in splits.train)
    taste = torch.randn(64, 10, generator=source)
    logits = (x @ taste) / 3 + 1.5 * F.one_hot(y, 10)
    action = torch.multinomial(logits.softmax(1), 1, generator=source)
    reward = (action[:, 0] == y).float() + 0.3 * torch.randn(len(y), generator=source)
    log_old = logits.log_softmax(1).gather(1, action)[:, 0]

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        state, taken, old, gain = batch
        advantage = (gain - gain.mean()) / gain.std()
        log_new = model(state).log_softmax(1)
        ratio = torch.exp(log_new.gather(1, taken[:, None])[:, 0] - old)
        bounded = ratio.clamp(1 - CLIP, 1 + CLIP)
        entropy = -(log_new.exp() * log_new).sum(1).mean()
        return -torch.minimum(ratio * advantage, bounded * advantage).mean() - 0.003 * entropy

    data = Splits((x, action[:, 0], log_old, reward), splits.validation, splits.test)
    return Setup(dense([64, 64, 64, 10], nn.Tanh), data, loss, expected_reward, chance=10.0)


TIME_STEP = 0.05
STRONGEST = 2.0


def swing(state: Tensor, torque: Tensor) -> Tensor:
    """Angle from upright and speed of a pendulum after a short time."""
    angle, speed = state.unbind(1)
    speed = speed + TIME_STEP * (5 * torch.sin(angle) + 3 * torque.clamp(-STRONGEST, STRONGEST) - 0.1 * speed)
    return torch.stack([angle + TIME_STEP * speed, speed], 1)


def expert(state: Tensor) -> Tensor:
    """Pumps energy into the pendulum until it is nearly upright, and balances it there."""
    angle, speed = state.unbind(1)
    lacking = 5 - (0.5 * speed**2 + 5 * angle.cos())
    wrapped = torch.atan2(angle.sin(), angle.cos())
    balance = -6 * wrapped - 2 * speed
    pump = 1.5 * lacking * torch.tanh(4 * speed)
    return torch.where(wrapped.abs() < 0.4, balance, pump).clamp(-STRONGEST, STRONGEST)


def seen(state: Tensor) -> Tensor:
    """What a policy knows of a state."""
    angle, speed = state.unbind(1)
    return torch.stack([angle.cos(), angle.sin(), speed / 4], 1)


def starts(number: int, source: torch.Generator) -> Tensor:
    """Pendulums that hang and swing a little."""
    return torch.stack([torch.pi + torch.randn(number, generator=source), torch.randn(number, generator=source)], 1)


def upright(policy: Callable[[Tensor], Tensor], state: Tensor, steps: int = 120) -> float:
    """How high the pendulum is over time, in percent."""
    height = 0.0
    for _ in range(steps):
        state = swing(state, policy(state))
        height += (1 + state[:, 0].cos()).mean().item() / 2
    return 100 * height / steps


class GaussianPolicy(nn.Module):
    """Mean and deviation of the torque."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.body = dense([3, width, width, 2], nn.Tanh)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, spread = self.body(x).unbind(1)
        return mean, F.softplus(spread) + 0.05


@suite_task("reinforcement", "height %", "higher", steps=800, batch_size=64)
def cloned_controller() -> Setup:
    """A controller that swings a pendulum up is copied from its noisy actions by their likelihood, and then let act."""
    source = generator(144)
    state, states, actions = starts(60, source), [], []
    for _ in range(120):
        torque = expert(state) + 0.3 * torch.randn(len(state), generator=source)
        states.append(seen(state))
        actions.append(torque)
        state = swing(state, torque)
    splits = Splits((torch.cat(states), torch.cat(actions)), (starts(200, source),), (starts(300, source),))

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        mean, deviation = model(batch[0])
        return -torch.distributions.Normal(mean, deviation).log_prob(batch[1]).mean()

    def measure(model: nn.Module, data: Batch) -> float:
        return upright(lambda state: model(seen(state))[0], data[0])

    return Setup(GaussianPolicy(), splits, loss, measure, upright(lambda state: 0 * state[:, 0], splits.test[0]))


TASKS = (clipped_surrogate, cloned_controller)
