"""Windows, best accuracies and times to a loss, on outcomes made up for the purpose."""

from __future__ import annotations

import math

import pytest

from ddpnopt.lab.methods.method import Method
from ddpnopt.lab.methods.registry import METHODS, WINDOW_METHODS, ddpnopt_defaults
from ddpnopt.lab.runs.config import RunConfig
from ddpnopt.lab.runs.outcome import Curve, Outcome
from ddpnopt.lab.windows.standings import Point, Window, standings, time_to, wall, window
from ddpnopt.lab.windows.window_plan import promising
from ddpnopt.lab.windows.window_tasks import TASKS

TASK = TASKS["digits"]


def outcome(accuracy: float, lr: float, *, diverged: bool = False, pace: float = 1.0, loss: float = 0.0) -> Outcome:
    """A run of ten samples whose loss falls evenly from 10 to 1 (plus `loss`), a sample every `pace` seconds."""
    steps = list(range(1, 11))
    curve = Curve(steps, [pace * t for t in steps], [pace * t for t in steps], [11.0 - t + loss for t in steps])
    return Outcome(math.nan if diverged else accuracy, lr, 10 * pace, 10 * pace, 10, diverged, "", curve)


def points(*accuracies: float) -> list[Point]:
    return [Point(10 ** (i / 2), (outcome(a, 10 ** (i / 2)),), 10.0) for i, a in enumerate(accuracies)]


@pytest.mark.parametrize(
    ("accuracies", "decades", "ends", "open_ended"),
    [
        ((10, 95, 96, 97, 10), 1.5, (1, 3), False),
        ((95, 96, 10, 10), 1.0, (0, 1), True),
        ((10, 95, 10, 95, 95, 10), 1.0, (3, 4), False),
        ((95, 95, 95, 95), 2.0, (0, 3), True),
        ((10, 10, 94.9, 10), 0.0, None, False),
        ((10, 95, 10), 0.5, (1, 1), False),
    ],
)
def test_the_window_is_the_longest_stretch_of_good_rates(
    accuracies: tuple[float, ...], decades: float, ends: tuple[int, int] | None, open_ended: bool
) -> None:
    found = window(points(*accuracies), 95.0)
    assert found.decades == pytest.approx(decades)
    if ends is None:
        assert found == Window.none() or math.isnan(found.lowest)
    else:
        assert (found.lowest, found.highest) == pytest.approx((10 ** (ends[0] / 2), 10 ** (ends[1] / 2)))
    assert found.open_ended is open_ended


def test_a_run_that_diverged_counts_as_guessing() -> None:
    point = Point(1.0, (outcome(90, 1.0), outcome(0, 1.0, diverged=True)), 10.0)
    assert point.accuracy == pytest.approx(50.0)
    assert point.diverged == 1


def test_a_run_whose_loss_exploded_counts_as_diverged() -> None:
    assert Point(1.0, (outcome(30, 1.0, loss=20.0), outcome(30, 1.0, loss=30.0)), 10.0).diverged == 1


def test_time_to_a_loss_is_interpolated() -> None:
    curve = outcome(90, 1.0, pace=2.0).curve
    assert time_to(curve, 5.5, wall) == pytest.approx(11.0)
    assert time_to(curve, 10.0, wall) == pytest.approx(2.0)
    assert time_to(curve, 0.5, wall) == math.inf


def test_the_standings_of_a_task() -> None:
    ours, adam, sgd = "given-lr", "adam", "sgd-m"
    outcomes = {}
    for seed in (0, 1):
        for lr, accuracy in ((0.1, 94.0), (0.316, 95.0), (1.0, 93.5)):
            outcomes[RunConfig(ours, TASK, lr, seed=seed)] = outcome(accuracy, lr, pace=2.0)
        outcomes[RunConfig(adam, TASK, 0.001, seed=seed)] = outcome(96.0, 0.001)
        outcomes[RunConfig(adam, TASK, 0.00316, seed=seed)] = outcome(0, 0.00316, diverged=seed == 1)
        outcomes[RunConfig(adam, TASK, None, seed=seed)] = outcome(91.0, 0.003)
        outcomes[RunConfig(sgd, TASK, 0.01, seed=seed)] = outcome(80.0, 0.01, pace=0.5)
    result = standings(TASK, outcomes)
    assert result is not None
    assert result.best_accuracy == pytest.approx(96.0)
    assert (result.target_of, result.fastest, result.seeds) == ("Adam", "SGD-m", 2)
    assert result.target == pytest.approx(4.0)  # at the seventh of ten samples
    rows = {row.method.name: row for row in result.rows}
    assert list(rows) == ["given-lr", "adam", "sgd-m"]
    assert rows["given-lr"].window.decades == pytest.approx(0.75, abs=0.26)
    assert rows["given-lr"].own_window.decades == pytest.approx(1.5, abs=0.01)
    assert rows["given-lr"].default is None
    assert rows["adam"].default is not None
    assert rows["adam"].default.accuracy == pytest.approx(91.0)
    assert (rows["adam"].diverged, rows["adam"].runs) == (1, 4)
    assert rows["sgd-m"].window.decades == 0
    assert [rows[name].time_ratio for name in rows] == pytest.approx([4.0, 2.0, 1.0])


def test_a_method_that_never_reaches_the_loss_has_no_time() -> None:
    outcomes = {
        RunConfig("adam", TASK, 0.001, seed=0): outcome(96.0, 0.001),
        RunConfig("given-lr", TASK, 1.0, seed=0): outcome(90.0, 1.0, loss=50.0),
    }
    result = standings(TASK, outcomes)
    assert result is not None
    assert math.isnan(result.rows[0].time_ratio)


def test_ranges_are_fifteen_half_decades() -> None:
    for name in WINDOW_METHODS[1:]:
        rates = METHODS[name].window_rates()
        assert len(rates) == 15
        assert math.log10(rates[-1] / rates[0]) == pytest.approx(7, abs=0.01)
    assert METHODS["ddpnopt"].window_rates() == []  # it has no rate
    assert METHODS["given-lr"].window_rates()[0] == 0.001
    assert METHODS["given-lr"].window_rates(2) == [0.001, 10_000.0]
    assert set(METHODS["adam"].window_rates(5)) <= set(METHODS["adam"].window_rates())


def test_a_form_of_ddpnopt_that_is_its_default_is_the_same_run(monkeypatch: pytest.MonkeyPatch) -> None:
    base = METHODS["ddpnopt"]
    spelled = Method("named", "named", base.factory, is_ddpnopt=True, options={"value": ddpnopt_defaults()["value"]})
    monkeypatch.setitem(METHODS, "named", spelled)
    assert RunConfig("given-lr", TASK, 1.0).key == RunConfig("ddpnopt", TASK, 1.0).key
    assert RunConfig("named", TASK, 1.0).key == RunConfig("ddpnopt", TASK, 1.0).key
    assert RunConfig("sampled", TASK, 1.0).key != RunConfig("sqrt", TASK, 1.0).key


def test_further_seeds_are_for_rates_that_came_near_and_for_the_default() -> None:
    adam = "adam"
    accuracies = {0.001: 95.0, 0.01: 86.0, 0.1: 84.0}
    first = {RunConfig(adam, TASK, lr, seed=0): outcome(a, lr) for lr, a in accuracies.items()}
    first[RunConfig(adam, TASK, 1.0, seed=0)] = outcome(0, 1.0, diverged=True)
    further = [RunConfig(adam, TASK, lr, seed=seed) for seed in (1, 2) for lr in (*accuracies, 1.0, None)]
    chosen = promising(further, first, near=10)
    assert [(run.lr, run.seed) for run in chosen] == [(lr, seed) for seed in (1, 2) for lr in (0.001, 0.01, None)]
    there = {**first, **{run: outcome(90.0, run.lr or 0.003) for run in chosen}}
    result = standings(TASK, there)
    assert result is not None
    assert result.seeds_in_words == "1 to 3 seeds"
