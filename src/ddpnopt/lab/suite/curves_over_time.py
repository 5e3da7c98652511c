"""Curves over time: a learned differential equation, curves from few points, gestures, a flight to a place."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt.lab.suite.data import generator, split
from ddpnopt.lab.suite.fully_connected import dense
from ddpnopt.lab.suite.glyphs import nearest_is_same
from ddpnopt.lab.suite.measures import error_of_mean, squared_error
from ddpnopt.lab.suite.regression import mean_squared_error
from ddpnopt.lab.suite.task import Batch, Setup, Splits, suite_task

TIME_STEP = 0.25


class LearnedFlow(nn.Module):
    """The velocity of a state by a network; the states at later times by the midpoint rule."""

    def __init__(self, inputs: int, times: int, width: int = 48) -> None:
        super().__init__()
        self.velocity, self.times = dense([inputs, width, width, inputs], nn.Tanh), times

    def forward(self, state: Tensor) -> Tensor:
        states = []
        for _ in range(self.times):
            middle = state + TIME_STEP / 2 * self.velocity(state)
            state = state + TIME_STEP * self.velocity(middle)
            states.append(state)
        return torch.stack(states, 1)


@suite_task("recurrent", "squared error", "lower", steps=300, batch_size=32, sealed=True)
def neural_ode_oscillator() -> Setup:
    """Van der Pol's oscillator from noisy ways of twelve times; chance is the mean way."""
    source = generator(206)
    start = 4 * torch.rand(2000, 2, generator=source) - 2
    state, states, fine = start, [], 20
    for step in range(12 * fine):
        place, speed = state.unbind(1)
        change = torch.stack([speed, (1 - place**2) * speed - place], 1)
        state = state + TIME_STEP / fine * change
        if step % fine == fine - 1:
            states.append(state)
    way = torch.stack(states, 1)
    splits = split((start, way + 0.03 * torch.randn(way.shape, generator=source)), 250, 500)
    chance = error_of_mean(splits.train[1], splits.test[1])
    return Setup(LearnedFlow(2, 12), splits, mean_squared_error, squared_error, chance)


class Hypernetwork(nn.Module):
    """What is known of a curve becomes the weights of a small network, which is asked for other places."""

    def __init__(self, known: int, hidden: int = 16) -> None:
        super().__init__()
        self.hidden = hidden
        self.weights = dense([known, 128, 128, 3 * hidden + 1])

    def forward(self, known: Tensor, places: Tensor) -> Tensor:
        weights = self.weights(known)
        slope, bias, out = (part[:, None] for part in weights[:, 1:].split(self.hidden, 1))
        return (torch.tanh(4 * places[:, :, None] * slope + 2 * bias) * out).sum(2) + weights[:, :1]


@suite_task("regression", "squared error", "lower", steps=500, batch_size=100, sealed=True)
def hypernetwork_curves() -> Setup:
    """A curve from fourteen noisy values of it, asked for at sixteen places; chance is the mean of all curves."""
    source = generator(207)
    number = 6000
    size, phase, speed = (torch.rand(number, 1, generator=source) for _ in range(3))

    def curve(place: Tensor) -> Tensor:
        return (0.5 + size) * torch.sin((2 + 3 * speed) * place + 6.3 * phase) + (2 * size - 1) * place

    grid = torch.linspace(-1, 1, 14).expand(number, -1)
    known = curve(grid) + 0.1 * torch.randn(number, 14, generator=source)
    places = 2 * torch.rand(number, 16, generator=source) - 1
    splits = split((known, places, curve(places)), 700, 1500)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.mse_loss(model(*batch[:2]), batch[2])

    chance = F.mse_loss(splits.train[2].mean().expand_as(splits.test[2]), splits.test[2]).item()
    return Setup(Hypernetwork(14), splits, loss, lambda net, data: loss(net, data).item(), chance)


EACH, SEEN = 40, 50


@lru_cache
def gestures(classes: int = 90, times: int = 24) -> Tensor:
    """Ways of a hand (classes, 40, 2, 24): waves of four speeds, each time a little otherwise and at its own pace."""
    source = generator(208)
    size = torch.randn(classes, 1, 2, 4, generator=source) / torch.tensor([1.0, 1.5, 2.0, 3.0])
    phase = 6.3 * torch.rand(classes, 1, 2, 4, generator=source)
    size = size + 0.2 * torch.randn(classes, EACH, 2, 4, generator=source)
    phase = phase + 0.3 * torch.randn(classes, EACH, 2, 4, generator=source)
    time = torch.linspace(0, 1, times) ** torch.exp(0.25 * torch.randn(classes, EACH, 1, 1, 1, generator=source))
    waves = torch.sin(6.3 * torch.arange(1, 5)[:, None] * time + phase[..., None])
    way = (size[..., None] * waves).sum(3)
    return way + 0.15 * torch.randn(way.shape, generator=source)


class Proxies(nn.Module):
    """Vectors of length one; called for the distances it returns those to the learned place of each class."""

    def __init__(self, classes: int, width: int = 16) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv1d(2, 24, 5, 2, padding=2),
            nn.ReLU(),
            nn.Conv1d(24, 32, 3, 2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 6, width),
        )
        self.places = nn.Parameter(torch.randn(classes, width))

    def forward(self, x: Tensor, distances: bool = False) -> Tensor:
        code = F.normalize(self.encoder(x), dim=1)
        if not distances:
            return code
        return (code[:, None] - F.normalize(self.places, dim=1)).square().sum(2)


@suite_task("embeddings", "accuracy %", "higher", steps=400, batch_size=64, sealed=True)
def proxy_gestures() -> Setup:
    """Gestures near the proxy of their class and far from others; measured on new classes by the nearest gesture."""
    ways = gestures()

    def part(first: int, last: int) -> Batch:
        return ways[first:last].flatten(0, 1), torch.arange(last - first).repeat_interleave(EACH)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(-6 * model(batch[0], distances=True), batch[1])

    def measure(model: nn.Module, data: Batch) -> float:
        return nearest_is_same(model(data[0]), data[1])

    splits = Splits(part(0, SEEN), part(SEEN, 70), part(70, 90))
    return Setup(Proxies(SEEN), splits, loss, measure, chance=100 / 20)


def fly(policy: nn.Module | None, start: Tensor, steps: int = 16) -> Tensor:
    """Mean cost of a flight: distance and speed at the end, a little for the fuel.

    The rows of `start` are place, speed and wind; the thrust is bounded and the air resists by the square of the speed.
    """
    place, speed, wind = start.chunk(3, 1)
    fuel = torch.zeros(len(start))
    for _ in range(steps):
        seen = torch.cat([place, speed, wind], 1)
        thrust = torch.zeros_like(place) if policy is None else 2 * torch.tanh(policy(seen))
        relative = speed - wind
        speed = speed + 0.2 * (thrust - 0.3 * relative * relative.norm(dim=1, keepdim=True))
        place = place + 0.2 * speed
        fuel = fuel + thrust.square().sum(1)
    cost = place.square().sum(1) + 0.3 * speed.square().sum(1) + 0.005 * fuel
    return cost.mean()


@suite_task("reinforcement", "cost", "lower", steps=300, batch_size=64, sealed=True)
def flight_through_wind() -> Setup:
    """A policy flies to a place in a wind; the gradient of the cost goes through the flight. Chance is no thrust."""
    start = torch.randn(3000, 6, generator=generator(209)) * torch.tensor([2.0, 2.0, 1.0, 1.0, 1.0, 1.0])
    splits = split((start,), 400, 800)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return fly(model, batch[0])

    chance = fly(None, splits.test[0]).item()
    model = dense([6, 48, 48, 2], nn.Tanh)
    return Setup(model, splits, loss, lambda net, data: loss(net, data).item(), chance)


TASKS = (neural_ode_oscillator, hypernetwork_curves, proxy_gestures, flight_through_wind)
