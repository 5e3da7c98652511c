"""A replay draws what the recorded pass has drawn, also from the generators of Python and numpy."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt import DDPNOpt, TrainingWarning

DRAWS: dict[str, Callable[[], float]] = {
    "python": random.random,
    "numpy": lambda: float(np.random.rand()),  # noqa: NPY002 - what models use
    "torch": lambda: float(torch.rand(())),
}


class Choosing(nn.Module):
    """Scales its inputs by a number that it draws."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.a, self.b, self.draw = nn.Linear(5, 6), nn.Linear(6, 3), draw
        self.drawn: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.drawn.append(self.draw())
        found: Tensor = self.b(torch.tanh(self.a(x * (1 + self.drawn[-1]))))
        return found


def seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002


@pytest.mark.parametrize("passes", [1, 2], ids=["one pass", "micro-batches"])
@pytest.mark.parametrize("name", DRAWS)
def test_a_replay_draws_the_numbers_of_the_recorded_pass(name: str, passes: int) -> None:
    model, draw = Choosing(DRAWS[name]), DRAWS[name]
    opt = DDPNOpt(model)
    x, y = torch.randn(8, 5), torch.randint(3, (8,))
    seed()
    wanted = [draw() for _ in range(6 * passes)]
    seed()
    for step in range(5):
        opt.zero_grad()
        model.drawn.clear()
        for _ in range(passes):
            (F.cross_entropy(model(x), y) / passes).backward()
        opt.step()
        mine = wanted[step * passes : (step + 1) * passes]
        assert model.drawn[:passes] == mine
        assert len(model.drawn) > passes
        assert set(model.drawn) == set(mine)
    assert draw() == wanted[5 * passes]  # the stream goes on as if there had been one pass


def test_a_model_that_draws_nothing_has_no_state_of_the_host_kept() -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.5), nn.Linear(6, 3))
    opt = DDPNOpt(model)
    x, y = torch.randn(8, 5), torch.randint(3, (8,))
    for _ in range(5):
        random.random()  # by the training loop, between the passes
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        assert opt._capture.arrivals.recordings[0].rng.host is None
        opt.step()
    assert not opt._capture.host.used


class Dropping(nn.Module):
    """Dropout by random numbers of its own, or by torch's."""

    def __init__(self, *, own: bool, last: bool = False) -> None:
        super().__init__()
        self.last = last  # of the outputs
        self.a, self.b = nn.Linear(5, 40), nn.Linear(40, 3)
        self.generator = torch.Generator().manual_seed(1) if own else None

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        h = self.b(h) if self.last else h
        h = h * (torch.rand(h.shape, generator=self.generator) < 0.7)
        return h if self.last else self.b(h)  # type: ignore[no-any-return]


@pytest.mark.parametrize("last", [False, True], ids=["between layers", "behind the last layer"])
def test_a_model_with_random_numbers_of_its_own_is_told_and_trains_without_second_passes(last: bool) -> None:
    model = Dropping(own=True, last=last)
    opt = DDPNOpt(model)
    x, y = torch.randn(24, 5), torch.randint(3, (24,))
    losses: list[float] = []

    def step() -> None:
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        losses.append(float(loss.detach()))

    with pytest.warns(TrainingWarning, match="a random generator of its own"):
        step()
    for _ in range(59):
        step()
    assert opt.report.planned == 60
    assert sum(losses[-10:]) < (0.8 if last else 0.6) * sum(losses[:10])


@pytest.mark.parametrize("passes", [1, 2], ids=["one pass", "micro-batches"])
def test_a_model_with_random_numbers_of_torch_has_second_passes(passes: int) -> None:
    model = Dropping(own=False)
    opt = DDPNOpt(model, closed_loop=True)
    x, y = torch.randn(24, 5), torch.randint(3, (24,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            opt.zero_grad()
            for _ in range(passes):
                (F.cross_entropy(model(x), y) / passes).backward()
            opt.step()
    assert opt.report.planned == 0


def test_a_first_batch_that_is_not_finite_says_nothing_about_the_second_pass() -> None:
    model = Dropping(own=False)
    opt = DDPNOpt(model, on_nonfinite="skip")
    y = torch.randint(3, (24,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for bad in (float("nan"), float("inf"), 1.0):
            opt.zero_grad()
            F.cross_entropy(model(torch.randn(24, 5) * bad), y).backward()
            opt.step()
    assert opt.report.skipped == 2
    assert opt.closed_loop
