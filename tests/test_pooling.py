"""The plain maximum in place of torch's max pooling with indices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ddpnopt import DDPNOpt
from ddpnopt.trace import max_pooling as pooling
from ddpnopt.trace.max_pooling import PlainMaxPooling

sizes = st.one_of(st.integers(1, 4), st.tuples(st.integers(1, 3), st.integers(1, 3)))


@settings(max_examples=60, deadline=None)
@given(kernel=sizes, stride=st.none() | sizes, ceil=st.booleans(), pad=st.integers(0, 1), images=st.booleans())
def test_it_gives_the_same_numbers(kernel: Any, stride: Any, ceil: bool, pad: int, images: bool) -> None:
    x = torch.randn(*([2] if images else []), 3, 9, 8)
    x[..., 4, 4] = float("nan")
    module = nn.MaxPool2d(kernel, stride, padding=min(pad, *([kernel] if isinstance(kernel, int) else kernel)) // 2)
    module.ceil_mode = ceil
    with torch.no_grad():
        expected = module(x)
        with PlainMaxPooling():
            found = module(x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_indices_are_found_where_they_are_asked_for() -> None:
    x = torch.randn(2, 3, 6, 6)
    with PlainMaxPooling():
        values, indices = F.max_pool2d(x, 2, return_indices=True)
    assert torch.equal(values.flatten(2), x.flatten(2).gather(2, indices.flatten(2)))


def test_a_kernel_larger_than_the_image_fails_as_ever() -> None:
    with PlainMaxPooling(), pytest.raises(RuntimeError, match="too small"):
        F.max_pool2d(torch.randn(1, 1, 1, 1), 2)


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(1, 2, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(F.max_pool2d(self.conv(x).relu(), 2).view(len(x), -1))


def test_the_second_sweep_uses_it_and_the_step_stays_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained() -> tuple[Functional, int]:
        calls = []
        plain = pooling._along
        monkeypatch.setattr(pooling, "_along", lambda *args: (calls.append(1), plain(*args))[1])
        torch.manual_seed(0)
        model = Functional()
        optimizer = DDPNOpt(model)
        for _ in range(3):
            F.cross_entropy(model(torch.randn(5, 1, 6, 6)), torch.randint(3, (5,))).backward()
            optimizer.step()
        monkeypatch.setattr(pooling, "_along", plain)
        return model, len(calls)

    with_it, calls = trained()
    monkeypatch.setattr(pooling, "POOLINGS", ())
    without, none = trained()
    assert calls >= 6
    assert none == 0
    for a, b in zip(with_it.parameters(), without.parameters(), strict=True):
        assert torch.equal(a, b)
