"""Verdicts with errors."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import stdev

import numpy as np
import pytest

from ddpnopt.lab.paper import fig_spectrum
from ddpnopt.lab.paper.readings import READINGS, options
from ddpnopt.lab.paper.verdicts import (
    SECOND_LOOK,
    USUAL_SEEDS,
    Estimate,
    all_of,
    better,
    difference,
    fair,
    jackknife,
    joint_seeds,
    lead_over,
    open_because,
    standard_errors,
    student_quantile,
)

RESULTS = Path(__file__).parents[3] / "results"


def test_a_difference_within_its_margin_of_error_is_open() -> None:
    assert Estimate(1.0, 0.4, seeds=30).positive is True
    assert Estimate(-1.0, 0.4, seeds=30).positive is False
    assert Estimate(1.0, 0.6, seeds=30).positive is None
    assert Estimate(math.nan, 0.1, seeds=30).positive is None


@pytest.mark.parametrize("seeds", [3, 4, 7, 10, 30])
def test_chance_alone_decides_one_claim_in_twenty_with_few_seeds_as_with_many(seeds: int) -> None:
    draws = np.random.default_rng(0).normal(size=(4000, seeds))
    decided = sum(Estimate.of(draw).positive is not None for draw in draws.tolist())
    assert 0.04 < decided / len(draws) < 0.06


@pytest.mark.parametrize(
    ("probability", "degrees", "known"),
    [(0.975, 2, 4.303), (0.975, 3, 3.182), (0.975, 9, 2.262), (0.975, 29, 2.045), (0.995, 4, 4.604), (0.99, 2, 6.965)],
)
def test_the_quantiles_are_those_of_the_tables(probability: float, degrees: int, known: float) -> None:
    assert student_quantile(probability, degrees) == pytest.approx(known, rel=4e-3)


def test_more_seeds_need_fewer_standard_errors_up_to_the_usual_number() -> None:
    needed = [standard_errors(seeds) for seeds in range(3, USUAL_SEEDS + 1)]
    assert needed == sorted(needed, reverse=True)
    assert (needed[0], needed[-1]) == (pytest.approx(4.30, abs=0.01), pytest.approx(2.045, abs=0.01))


def test_more_seeds_after_a_look_at_few_have_the_wider_margin_also_where_some_are_left_out() -> None:
    assert Estimate(1.0, 0.4, seeds=12, usual=6).margin > Estimate(1.0, 0.4, seeds=12).margin
    ours, theirs = [1.0] * 12, [0.9, 0.1] * 6
    _, lead = lead_over(ours, theirs, [True] * 5 + [False] * 7, 1, usual=6)
    assert lead.seeds == 5
    assert lead.margin == pytest.approx(standard_errors(5, usual=4) * lead.error)
    assert lead_over(ours[:6], theirs[:6], [True] * 6, 1, usual=6)[1].margin == pytest.approx(
        standard_errors(6) * lead_over(ours[:6], theirs[:6], [True] * 6, 1)[1].error
    )


@pytest.mark.parametrize("looks", [(USUAL_SEEDS, 2 * USUAL_SEEDS), (USUAL_SEEDS, SECOND_LOOK, 4 * SECOND_LOOK)])
def test_chance_alone_decides_at_most_one_claim_in_twenty_also_after_earlier_looks(looks: Sequence[int]) -> None:
    draws = np.random.default_rng(0).normal(size=(6000, looks[-1]))
    bound = standard_errors(looks[-1])
    decided = np.zeros(len(draws), bool)
    for seeds in looks:
        seen = draws[:, :seeds]
        decided |= np.abs(seen.mean(1)) > bound * seen.std(1, ddof=1) / math.sqrt(seeds)
    assert 0.04 < decided.mean() < 0.06


def test_the_worst_of_several_rivals_refutes_by_chance_in_one_case_of_forty() -> None:
    draws = np.random.default_rng(0).normal(size=(3000, 4, 10))
    refuted = [any(Estimate.of(rival).behind(4) for rival in draw) for draw in draws.tolist()]
    assert 0.015 < np.mean(refuted) < 0.03


def test_differences_are_taken_seed_by_seed() -> None:
    found = difference([1.0, 11.0, 21.0], [0.0, 9.9, 20.0])
    assert found.mean == pytest.approx(1.0333, abs=1e-3)
    assert found.error < 0.05
    assert found.positive is True


def test_two_seeds_and_a_run_that_diverged_decide_nothing() -> None:
    assert difference([1.0, 1.0], [0.0, 0.0]).positive is None
    assert difference([1.0, 1.0, math.inf], [0.0, 0.0, 0.0]).positive is None


def test_a_range_is_judged_on_both_sides() -> None:
    assert Estimate(7.0, 0.5, 30).within(5, 10) is True
    assert Estimate(5.5, 0.5, 30).within(5, 10) is None
    assert Estimate(3.0, 0.5, 30).within(5, 10) is False
    assert Estimate(12.0, 0.5, 30).within(5, 10) is False


@pytest.mark.parametrize(("mean", "seeds"), [(0.9, 5), (0.9, 30), (-0.3, 30), (0.05, 10)])
def test_the_seeds_that_would_decide_a_claim_do_and_one_less_does_not(mean: float, seeds: int) -> None:
    found = Estimate(mean, 1.0, seeds)
    needed = found.decisive_seeds
    decided = [n for n in range(3, 2000) if Estimate(mean, math.sqrt(seeds / n), n).positive is not None]
    assert needed == (decided[0] if decided else None)


def test_an_open_claim_says_how_many_seeds_it_would_take() -> None:
    assert "about 76 seeds" in open_because("The growth", Estimate(0.028, 0.02, 30))
    assert "more than 2,000 seeds" in open_because("The growth", Estimate(0.001, 0.02, 30))
    assert "no margin of error" in open_because("The growth", Estimate.of([1.0, 2.0]))


def test_one_rival_ahead_refutes_with_fewer_seeds_than_all_behind() -> None:
    near, far, ahead = Estimate(0.5, 0.4, 30), Estimate(0.2, 0.4, 30), Estimate(-0.4, 0.4, 30)
    assert joint_seeds([near, far]) == far.decisive_seeds
    assert joint_seeds([near, far, ahead]) == ahead.decisive_seeds
    assert joint_seeds([near, Estimate(0.0, 0.4, 30)]) is None


def test_a_lead_over_one_of_several_rivals_is_lost_beyond_a_wider_margin_than_it_is_won() -> None:
    assert Estimate(2.3, 1.0, 30).ahead(4) is True
    assert Estimate(-2.3, 1.0, 30).ahead(4) is None
    assert Estimate(-2.3, 1.0, 30).ahead(1) is False
    assert Estimate(-3.0, 1.0, 30).ahead(4) is False


def test_equal_accuracies_are_not_better_by_rounding() -> None:
    step = 100 / 359
    assert not better([90 + step - 90, 3 * step, -step, -3 * step])
    assert better([0.0, 0.0, step])


def test_the_jackknife_of_a_mean_is_its_standard_error() -> None:
    values = [1.0, 4.0, 2.0, 7.0]
    found = jackknife(lambda seeds: sum(values[s] for s in seeds) / len(seeds), len(values))
    assert found.mean == pytest.approx(3.5)
    assert found.error == pytest.approx(stdev(values) / 2)


def test_one_failure_refutes_and_one_open_part_leaves_open() -> None:
    assert all_of([True, True]) is True
    assert all_of([True, None]) is None
    assert all_of([None, False, True]) is False
    assert all_of([]) is None


def test_losing_needs_no_fair_rival() -> None:
    assert fair(False, rival_seeds=1, rival_epochs=1) == (False, "")
    assert fair(True, rival_seeds=3, rival_epochs=2) == (True, "")
    assert fair(True, rival_seeds=2, rival_epochs=2)[0] is None
    assert fair(True, rival_seeds=3, rival_epochs=1)[0] is None


def test_seeds_on_which_the_rival_did_not_learn_win_nothing() -> None:
    ours, theirs, learned = [80.0, 81.0, 82.0, 83.0], [79.0, 80.1, 81.0, 10.0], [True, True, True, False]
    verdict, lead = lead_over(ours, theirs, learned, comparisons=1)
    assert verdict is True
    assert lead.mean == pytest.approx(0.967, abs=1e-3)
    level = [80.0, 81.1, 81.9, 10.0]
    assert lead_over(ours, level, learned, comparisons=1)[0] is None
    assert lead_over(ours, theirs, [True, True, False, False], comparisons=1)[0] is None


def test_own_failures_count_where_the_rival_learned() -> None:
    verdict, lead = lead_over([10.0, 81.0, 82.0, 83.0], [79.0, 80.0, 81.0, 82.0], [True] * 4, comparisons=1)
    assert verdict is None
    assert lead.mean < 0


def test_one_of_several_rivals_refutes_beyond_a_wider_margin() -> None:
    ours, theirs = [0.0, 0.0, 0.0, 0.0], [1.0, 1.2, 0.9, 2.5]
    assert lead_over(ours, theirs, [True] * 4, comparisons=1)[0] is False
    assert lead_over(ours, theirs, [True] * 4, comparisons=4)[0] is None


def test_every_reading_is_a_few_options_and_a_baseline_has_none_of_them() -> None:
    names = {"vxx_power", "guard", "terminal", "whole"}
    for each in READINGS.values():
        assert options("sgd", each) == {}
        assert set(options("ddpnopt-rmsprop", each)) <= names
        assert "whole" not in options("ddpnopt-sgd", each)


def test_the_rank_of_the_cross_entropy_is_explained() -> None:
    assert "k - 1" in fig_spectrum.OBJECTIVES[0].why_not_exact


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*/result.json")), ids=lambda path: path.parent.name)
def test_every_claim_that_does_not_hold_or_is_open_has_its_reason_on_the_page(path: Path) -> None:
    claims = json.loads(path.read_text(encoding="utf-8"))["claims"]
    assert [claim["text"] for claim in claims if not claim["holds"] and not claim.get("why")] == []
