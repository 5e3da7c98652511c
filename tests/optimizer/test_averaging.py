"""The average of the weights: what it is, and that nothing is lost around it."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt import DDPNOpt
from ddpnopt._averaging import EVERY, POWER
from ddpnopt.errors import StepError


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))


def train(model: nn.Module, optimizer: DDPNOpt, steps: int, seed: int = 1) -> list[list[Tensor]]:
    """The weights after each step."""
    generator, seen = torch.Generator().manual_seed(seed), []
    for _ in range(steps):
        x, y = torch.randn(6, 4, generator=generator), torch.randint(3, (6,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        seen.append(weights(model))
    return seen


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


def test_eval_puts_in_the_polynomial_average_of_every_fourth_step() -> None:
    model = network()
    optimizer = DDPNOpt(model)
    seen = train(model, optimizer, 5 * EVERY + 3)[EVERY - 1 :: EVERY]
    average = seen[0]
    for n, now in enumerate(seen[1:], start=2):
        average = [m + (POWER + 1) / (n + POWER) * (u - m) for m, u in zip(average, now, strict=True)]
    optimizer.eval()
    for found, expected in zip(weights(model), average, strict=True):
        torch.testing.assert_close(found, expected)


def test_training_is_the_same_with_and_without_and_train_puts_the_weights_back_bit_for_bit() -> None:
    with_it, without = network(), network()
    averaged, plain = DDPNOpt(with_it), DDPNOpt(without, average=False)
    for seed in range(3):
        train(with_it, averaged, 9, seed)
        averaged.eval()
        averaged.eval()  # once more changes nothing
        inside = weights(with_it)
        averaged.train()
        averaged.train()
        train(without, plain, 9, seed)
        assert equal(weights(with_it), weights(without))
        assert not equal(inside, weights(without))
        plain.eval()
        assert equal(weights(with_it), weights(without))
        plain.train()


def test_a_step_on_the_average_is_refused_and_nothing_is_lost() -> None:
    model = network()
    optimizer = DDPNOpt(model)
    train(model, optimizer, 5)
    optimizer.eval()
    inside = weights(model)
    with pytest.raises(StepError, match=r"opt\.train\(\)"):
        train(model, optimizer, 1)
    assert equal(weights(model), inside)
    optimizer.train()
    train(model, optimizer, 1)


@pytest.mark.parametrize("saved_in", ["train", "eval"])
def test_training_goes_on_bit_for_bit_from_a_state_saved_in_either_mode(saved_in: str) -> None:
    model = network()
    optimizer = DDPNOpt(model)
    train(model, optimizer, 11)
    getattr(optimizer, saved_in)()
    state: Any = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    optimizer.train()
    train(model, optimizer, 6, seed=2)

    again = network()
    fresh = DDPNOpt(again)
    again.load_state_dict(state[0])
    fresh.load_state_dict(state[1])
    fresh.train()
    train(again, fresh, 6, seed=2)
    assert equal(weights(model), weights(again))
    optimizer.eval()
    fresh.eval()
    assert equal(weights(model), weights(again))


def test_only_the_batch_form_keeps_an_average_unless_it_is_asked_for() -> None:
    for options, kept in (({}, True), ({"value": "outer", "lr": 0.1}, False), ({"lr": 0.1, "feedback": False}, False),
                          ({"value": "outer", "lr": 0.1, "average": True}, True)):  # fmt: skip
        model = network()
        optimizer = DDPNOpt(model, **options)  # type: ignore[arg-type]
        train(model, optimizer, EVERY)
        assert all("average" in optimizer.state[p] for p in model.parameters()) is kept


def test_an_optimizer_goes_with_its_last_reference() -> None:
    model = network()
    optimizer = DDPNOpt(model)
    train(model, optimizer, EVERY)
    seen = weakref.ref(optimizer)
    del optimizer
    assert seen() is None
