"""Runs, tuning and comparisons."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from ddpnopt.lab.comparison import comparison
from ddpnopt.lab.comparison.comparison import ComparedMethod, compare, tuned
from ddpnopt.lab.data import load
from ddpnopt.lab.errors import ExperimentError
from ddpnopt.lab.networks import build
from ddpnopt.lab.runs.classification import ClassificationTask, DatasetProblem, evaluate
from ddpnopt.lab.runs.config import RunConfig
from ddpnopt.lab.runs.outcome import Outcome, RunDetails, TrainingRecord
from ddpnopt.lab.runs.search import candidates, search
from ddpnopt.lab.runs.training import Progress, fit, perform, train
from ddpnopt.lab.style import smoothed
from ddpnopt.lab.tables import Spread

TASK = ClassificationTask("wine", epochs=3, batch_size=16)
WINE = RunConfig("adam", TASK, lr=0.01)


def details(outcome: Outcome) -> RunDetails:
    assert outcome.details is not None
    return outcome.details


def losses(outcome: Outcome) -> list[float]:
    return details(outcome).record.losses


def test_a_run_records_every_step_and_learns() -> None:
    seen: list[Progress] = []
    result = train(WINE.with_task(epochs=15), on_step=seen.append)
    assert result.steps == len(losses(result)) == len(seen) == 15 * math.ceil(142 / 16)
    assert len(details(result).record.epoch_losses) == 15
    assert seen[-1].step == seen[-1].steps == result.steps
    assert result.train_loss < losses(result)[0]
    assert result.accuracy > 80
    assert result.seconds > 0
    assert not result.diverged


def test_the_same_configuration_gives_the_same_curve() -> None:
    first, second, other = train(WINE), train(WINE), train(replace(WINE, seed=1))
    assert losses(first) == losses(second)
    assert losses(first) != losses(other)


def test_a_run_leaves_the_global_random_state_and_the_threads_as_they_were() -> None:
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    train(WINE)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.get_num_threads() == threads


def test_a_loss_that_is_not_finite_stops_the_run_as_diverged() -> None:
    data = load("wine")
    model = nn.Sequential(nn.Linear(13, 5), nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e30)
    record = fit(model, optimizer, data, epochs=5, batch_size=16, generator=torch.Generator())
    assert record.diverged
    assert 1 <= len(record.losses) < 10
    assert all(map(math.isfinite, record.losses))


def test_an_optimizer_that_refuses_a_step_counts_as_diverged() -> None:
    class Refusing(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            raise FloatingPointError("the update is not finite")

    model = nn.Linear(13, 3)
    record = fit(
        model,
        Refusing(model.parameters(), lr=0.1),
        load("wine"),
        epochs=1,
        batch_size=16,
        generator=torch.Generator(),
    )
    assert record.diverged
    assert record.losses == []


def test_the_learning_rate_of_the_result_is_the_one_that_was_used() -> None:
    assert train(replace(WINE, lr=None)).lr == 0.003
    assert train(WINE).lr == 0.01


def test_the_number_of_training_samples_can_be_limited() -> None:
    assert train(WINE.with_task(n_train=32)).steps == 3 * 2


def test_the_weights_of_the_result_are_those_that_were_evaluated() -> None:
    result, data = train(WINE), load("wine", seed=WINE.seed)
    model = build("fcn", data, seed=99)
    model.load_state_dict(details(result).weights)
    assert evaluate(model, data.x_train, data.y_train).loss == pytest.approx(result.train_loss)
    assert evaluate(model, data.x_test, data.y_test).metric == pytest.approx(result.accuracy)


@pytest.mark.parametrize("change", [{"epochs": 0}, {"batch_size": 0}, {"lr": -1.0}, {"lr": math.nan}])
def test_a_configuration_that_makes_no_sense_is_refused(change: dict[str, float]) -> None:
    with pytest.raises(ExperimentError):
        WINE.with_task(**change) if "lr" not in change else replace(WINE, **change)  # type: ignore[arg-type]


def test_tuning_never_sees_the_test_set(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def spy(config: RunConfig, problem: DatasetProblem) -> Outcome:
        sizes.append((len(problem.dataset.x_train), len(problem.dataset.x_test)))
        return train(config, problem)

    monkeypatch.setattr(comparison, "train", spy)
    tuned(TASK, [ComparedMethod("adam")])
    assert sizes == [(114, 28)] * 6  # of the 142 training samples, for each rate of the grid


def test_a_search_puts_the_better_learning_rate_first() -> None:
    base = WINE.with_task(epochs=10)
    grids = [[replace(base, lr=lr) for lr in (1e-7, 0.01, 1e30)], []]
    [best, worse, diverged], none = search(grids, 2, lambda configs: [train(config) for config in configs])
    assert (best.config.lr, worse.config.lr, diverged.config.lr) == (0.01, 1e-7, 1e30)
    assert best.metric > worse.metric
    assert diverged.train_loss >= math.log(3)
    assert none == []


def test_a_grid_of_points_spans_the_range_and_momentum_shortens_the_rate() -> None:
    assert [each.lr for each in candidates(WINE, 3)] == [0.0007, 0.00265, 0.01]
    tried = candidates(replace(WINE, method="sgd-m"), 2)
    assert {(each.lr, each.options["momentum"]) for each in tried} == {
        (0.07, 0.0), (0.035, 0.5), (0.007, 0.9), (0.5, 0.0), (0.25, 0.5), (0.05, 0.9),
    }  # fmt: skip
    assert candidates(replace(WINE, method="emsa"), 3) == []


def test_tuning_leaves_a_given_rate_alone() -> None:
    task = replace(TASK, epochs=1)
    given, chosen = tuned(task, [ComparedMethod("sgd", 0.5), ComparedMethod("sgd")])
    assert given.lr == 0.5
    assert chosen.lr is not None


def test_all_methods_of_a_seed_start_from_the_same_loss() -> None:
    result = compare(TASK, [ComparedMethod("sgd"), ComparedMethod("adam"), ComparedMethod("sgd", 0.5)], seeds=[0, 1])
    starts = {run.config.seed: run.record.losses[0] for run in result.summaries[0].runs}
    for summary in result.summaries:
        assert {run.config.seed: run.record.losses[0] for run in summary.runs} == starts
    assert [summary.label for summary in result.summaries] == ["SGD, lr 0.2", "Adam", "SGD, lr 0.5"]
    assert len(list(result.records())) == 6


def test_step_times_are_relative_to_sgd_and_unknown_without_it() -> None:
    with_sgd = compare(TASK, [ComparedMethod("sgd"), ComparedMethod("adam")], seeds=[0])
    without = compare(TASK, [ComparedMethod("adam")], seeds=[0])
    assert with_sgd.summaries[0].relative_step_time == 1
    assert math.isnan(without.summaries[0].relative_step_time)


@pytest.mark.parametrize(
    ("text", "entry"), [("adam", ComparedMethod("adam")), (" sgd@0.5 ", ComparedMethod("sgd", 0.5))]
)
def test_a_method_is_read_with_its_learning_rate(text: str, entry: ComparedMethod) -> None:
    assert ComparedMethod.parse(text) == entry


@pytest.mark.parametrize("text", ["adam@fast", "adam@", "lion"])
def test_a_method_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ExperimentError):
        ComparedMethod.parse(text)


def test_the_spread_of_seeds_is_the_sample_standard_deviation() -> None:
    assert Spread.of([1.0, 3.0]) == Spread(2.0, math.sqrt(2))
    assert math.isnan(Spread.of([1.0]).std)


def test_smoothing_is_the_mean_of_the_last_values_and_outlives_an_explosion() -> None:
    assert smoothed([1.0, 2.0, 3.0, 4.0], 2).tolist() == [1.0, 1.5, 2.5, 3.5]
    np.testing.assert_allclose(smoothed([1.0, 1e30, 1.0, 1.0, 0.01, 0.01], 2)[-1], 0.01, rtol=1e-6)


def test_a_run_of_a_sweep_carries_no_weights_and_records_what_ended_it(monkeypatch: pytest.MonkeyPatch) -> None:
    done = perform(WINE)
    assert done is not None
    assert done.details is None
    assert done.metric == train(WINE).metric

    def broken(*_: object) -> None:
        raise ZeroDivisionError("no step")

    monkeypatch.setattr(torch.optim.Adam, "step", broken)
    with pytest.raises(ZeroDivisionError):
        train(WINE)
    failed = perform(WINE)
    assert failed is not None
    assert failed.diverged
    assert failed.error == "ZeroDivisionError: no step"


def test_a_long_curve_is_sampled() -> None:
    record = TrainingRecord([float(step) for step in range(1, 1002)], [], [0.5] * 1001, [0.25] * 1001)
    curve = record.curve()
    assert len(curve.losses) == 50
    assert curve.steps[-1] == 1001
    assert curve.losses[0] == pytest.approx(10.5)
    assert curve.seconds == sorted(curve.seconds)
    assert (curve.seconds[-1], curve.cpu_seconds[-1]) == (500.5, 250.25)
