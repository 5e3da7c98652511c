"""Where samples left out of the batch say nothing, noise is told from coupling."""

from __future__ import annotations

import pytest

from ddpnopt.ddp.step_length import Evidence, StepLength


def after(unseen: list[float], *, coupled: bool = False, slope: float = 0.0, steps: int = 60) -> StepLength:
    """A length after batches whose evidence of samples left out goes round in `unseen`, with a slope after each."""
    length = StepLength()
    for i in range(steps):
        found = Evidence(1.0, 0.8, 0.4, unseen[i % len(unseen)], 0.3)
        if i:
            length.feel(slope * length.decrease)
        asked = length.choose(found, coupled=coupled)
        length.learn(found, asked, asked, -asked * found.own + 0.5 * asked**2 * found.own_curvature)
    return length


NOISE = [0.3, -0.2, -0.3, 0.15]
COUPLED = [-0.2, -0.22, -0.18, -0.21]


def test_noise_without_a_slope_shortens_the_steps() -> None:
    assert after(NOISE, steps=100).fraction < 0.5 * after(NOISE, steps=20).fraction


def test_a_clear_slope_lengthens_the_steps_in_spite_of_noise() -> None:
    assert after(NOISE, slope=-0.5).fraction > 2 * after(NOISE).fraction


@pytest.mark.parametrize("unseen", [COUPLED, NOISE])
def test_coupled_samples_keep_a_length_beyond_the_minimum(unseen: list[float]) -> None:
    known = unseen is NOISE  # a batch norm says so, or the evidence itself
    long, short = after(unseen, coupled=known, steps=100), after(unseen, coupled=known, steps=40)
    assert long.fraction >= short.fraction


def test_with_batch_norm_a_length_doubles_until_the_slope_says_that_it_went_too_far() -> None:
    doubling = [after(COUPLED, coupled=True, slope=-0.2, steps=n).fraction for n in (10, 11)]
    assert doubling[1] == pytest.approx(2 * doubling[0])
    assert not after(COUPLED, coupled=True, slope=-0.2).beyond
    assert after(COUPLED, coupled=True, slope=0.5).beyond


def test_with_batch_norm_a_curvature_of_short_steps_does_not_make_them_shorter() -> None:
    length = StepLength()
    for i in range(40):
        found = Evidence(1.0, 0.8, 0.4, -0.3, 0.3)
        if i:
            length.feel(0.0)
        asked = length.choose(found, coupled=True)
        length.learn(found, asked, asked, 0.0)  # rough at any length: no step lowers the loss of its own batch
    assert asked > 1.0
