"""Layers that start small, and curvature that short steps alone meet."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from step_runs import losses_of
from torch import Tensor, nn

from ddpnopt.ddp.covariance import note_scale
from ddpnopt.ddp.stage import Stage
from ddpnopt.ddp.step_length import GROWTH, PROBE, RISE, Evidence, StepLength
from ddpnopt.ddp.value.sizes import set_sizes
from ddpnopt.linear.linear import Linear

EPSILON = 1e-30  # of a layer norm: the scale of its input has no effect


class Words(nn.Module):
    """The classes of bags of words, whose embeddings go into a layer norm."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 16)
        self.norm = nn.LayerNorm(16, eps=EPSILON)
        self.out = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        with torch.no_grad():
            self.words.weight.mul_(scale)

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.out(self.norm(self.words(words)).mean(1))
        return out


class WithToken(nn.Module):
    """A token at zero goes into a layer norm, and the class is read from it."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, 16))
        self.into, self.out = nn.Linear(8, 16), nn.Linear(16, 4)
        for layer in (self.into, self.out):
            nn.init.normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)
        self.before, self.after = nn.LayerNorm(16, eps=1e-12), nn.LayerNorm(16, eps=1e-12)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat([self.token.expand(len(x), -1, -1), self.into(x)], 1)
        seen = self.before(h)
        h = h + self.attention(seen, seen, seen)[0]
        out: Tensor = self.out(self.after(h)[:, 0])
        return out


def sets(steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Six vectors each, whose class is the largest of the first four means."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(32, 6, 8, generator=generator)
        yield x, x[..., :4].mean(1).argmax(1)


def bags(steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        words = torch.randint(0, 20, (32, 5), generator=generator)
        yield words, F.one_hot(words % 4, 4).sum(1).argmax(1)


def final_loss(model: nn.Module, data: Iterator[tuple[Tensor, Tensor]]) -> float:
    """The mean loss of the last five batches."""
    return sum(losses_of(model, data)[-5:]) / 5


def test_embeddings_before_a_norm_train_alike_at_any_scale() -> None:
    def trained(scale: float) -> float:
        torch.manual_seed(0)
        return final_loss(Words(scale).double(), bags(40))

    expected = trained(1.0)
    assert expected < 0.5
    assert trained(1e-2) == pytest.approx(expected, rel=1e-6)
    assert trained(1e-6) == pytest.approx(expected, rel=0.1)  # next to zero it is their effect that sets their size


def test_a_token_at_zero_before_a_norm_does_not_stop_the_training() -> None:
    torch.manual_seed(0)
    assert final_loss(WithToken(), sets(60)) < 0.6


def counted(sizes: list[float], effects: list[float], inputs: float = 1.0, residual: float = 0.0) -> list[float]:
    """What 6 x 6 layers count as, first to last; `effects` are those of a relative change of each."""
    stages = []
    for size in sizes:
        stage = Stage(
            "", Linear((6, 6), False), torch.ones(2, 6), [torch.full((6, 6), size)], 1.0, [torch.ones(2, 6)], [None]
        )
        note_scale(stage.state, "input", inputs**2, 0.5)
        stages.append(stage)
    squares = [(effect / size) ** 2 / 36 for effect, size in zip(effects, sizes, strict=True)]
    set_sizes(stages[::-1], squares[::-1], torch.full((2,), residual))
    return [stage.size for stage in stages]


USUAL = 18**-0.5


def test_a_network_that_starts_small_as_a_whole_counts_as_one_of_the_usual_size() -> None:
    assert counted([0.2 * USUAL] * 4, [1.0] * 4) == pytest.approx([0.2 * USUAL] * 4)  # all of them do equally much
    found = counted([0.2 * USUAL] * 4, [0.05, 0.05, 0.05, 3.85])
    assert found == pytest.approx([USUAL, USUAL, USUAL, 0.2 * USUAL])
    assert counted([USUAL] * 4, [0.05, 0.05, 0.05, 3.85]) == pytest.approx([USUAL] * 4)


def test_layers_that_all_do_little_count_as_larger_up_to_the_usual_effect() -> None:
    assert counted([0.2 * USUAL] * 4, [0.1] * 4, residual=10.0) == pytest.approx([USUAL] * 4)
    assert counted([0.2 * USUAL] * 4, [0.1] * 4, residual=1.0) == pytest.approx([0.5 * USUAL] * 4)
    assert counted([USUAL] * 4, [0.1] * 4, residual=10.0) == pytest.approx([USUAL] * 4)


@given(st.floats(-1, 1), st.floats(-1, 1))
def test_what_a_layer_counts_as_follows_rescalings_that_leave_the_network_as_it_is(a: float, c: float) -> None:
    sizes, effects = [0.3, 0.02, 0.05, 0.1], [0.1, 0.3, 0.2, 1.4]
    factors = [10**a / 10**c, 10**-a, 1.0, 1.0]  # around a ReLU, and of the inputs
    found = counted([size * factor for size, factor in zip(sizes, factors, strict=True)], effects, 10**c)
    assert found == pytest.approx([size * f for size, f in zip(counted(sizes, effects), factors, strict=True)])


def bounded_length(**settings: Any) -> StepLength:
    """After a hundred steps that a large curvature has bounded."""
    return StepLength(steps=100, own=1.0, own_curvature=1.0, bounded=True, **settings)


def test_a_step_bounded_by_the_curvature_is_tried_longer_and_kept_if_it_is_better() -> None:
    length = bounded_length(kappa=60.0)
    assert length.longer_to_try(0.01, -0.005) == pytest.approx(PROBE)
    assert length.is_better(-0.02)
    assert length.kappa < 1
    assert length.wait == pytest.approx(RISE * length.steps)


def test_attempts_in_vain_become_rare() -> None:
    length, attempts = bounded_length(kappa=60.0), []
    for step in range(100, 3_000):
        length.steps = step
        if length.longer_to_try(0.01, -0.005) > 1:
            attempts.append(step)
            assert not length.is_better(0.3)
            assert length.kappa == 60.0
    assert len(attempts) == 5
    assert all(later > GROWTH * earlier for earlier, later in pairwise(attempts))


@pytest.mark.parametrize(
    "settings",
    [{"reach": 0.012}, {"amiss": 0.3}, {"wait": 200.0}],
    ids=["the limit", "a gradient of another loss", "a failure"],
)
def test_no_longer_step_is_tried_where_something_else_bounds_it(settings: dict[str, float]) -> None:
    assert bounded_length(kappa=60.0, **settings).longer_to_try(0.01, -0.005) == 1.0


def test_a_step_given_up_on_trial_is_forgotten_by_the_next_one() -> None:
    length = bounded_length(kappa=60.0, shorter=0.01, fraction=0.01)
    length.choose(Evidence(loss=1.0, own=1.0, own_curvature=1.0, unseen=0.8, unseen_curvature=0.8))
    assert length.shorter == 0.0
