"""Runs, tuning and comparisons."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from ddpnopt.lab.comparison import Entry, Spread, compare, tuned
from ddpnopt.lab.data import load
from ddpnopt.lab.errors import ExperimentError
from ddpnopt.lab.figures import smoothed
from ddpnopt.lab.networks import build
from ddpnopt.lab.runs.training import Progress, RunConfig, evaluate, fit, train
from ddpnopt.lab.runs.tuning import tune

WINE = RunConfig("adam", "wine", lr=0.01, epochs=3, batch_size=16)


def test_a_run_records_every_step_and_learns() -> None:
    seen: list[Progress] = []
    result = train(replace(WINE, epochs=15), on_step=seen.append)
    assert result.steps == len(result.losses) == len(seen) == 15 * math.ceil(142 / 16)
    assert len(result.epoch_losses) == 15
    assert seen[-1].step == seen[-1].steps == result.steps
    assert result.train_loss < result.losses[0]
    assert result.test_accuracy > 80
    assert result.seconds > 0
    assert not result.diverged


def test_the_same_configuration_gives_the_same_curve() -> None:
    first, second, other = train(WINE), train(WINE), train(replace(WINE, seed=1))
    assert first.losses == second.losses
    assert first.losses != other.losses


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
    assert train(replace(WINE, n_train=32)).steps == 3 * 2


def test_the_weights_of_the_result_are_those_that_were_evaluated() -> None:
    result, data = train(WINE), load("wine", seed=WINE.seed)
    model = build("fcn", data, seed=99)
    model.load_state_dict(result.weights)
    assert evaluate(model, data.x_train, data.y_train)[0] == pytest.approx(result.train_loss)
    assert evaluate(model, data.x_test, data.y_test)[1] == pytest.approx(result.test_accuracy)


@pytest.mark.parametrize("change", [{"epochs": 0}, {"batch_size": 0}, {"lr": -1.0}, {"lr": math.nan}])
def test_a_configuration_that_makes_no_sense_is_refused(change: dict[str, float]) -> None:
    with pytest.raises(ExperimentError):
        replace(WINE, **change)  # type: ignore[arg-type]


def test_tuning_never_sees_the_test_set(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def spy(config: RunConfig, dataset: object = None, **_: object) -> object:
        sizes.append((len(dataset.x_train), len(dataset.x_test)))  # type: ignore[attr-defined]
        return train(config, dataset)  # type: ignore[arg-type]

    monkeypatch.setattr("ddpnopt.lab.runs.tuning.train", spy)
    tune(WINE, (0.01, 0.1))
    assert sizes == [(114, 28)] * 2  # of the 142 training samples


def test_tuning_puts_the_better_learning_rate_first() -> None:
    best, worst = tune(replace(WINE, epochs=10), (1e-7, 0.01))
    assert (best.lr, worst.lr) == (0.01, 1e-7)
    assert best.validation_accuracy > worst.validation_accuracy


def test_tuning_leaves_a_given_rate_alone() -> None:
    config = replace(WINE, lr=None, epochs=1)
    given, chosen = tuned(config, [Entry("sgd", 0.5), Entry("sgd")])
    assert given.lr == 0.5
    assert chosen.lr is not None


def test_all_methods_of_a_seed_start_from_the_same_loss() -> None:
    result = compare(WINE, [Entry("sgd"), Entry("adam"), Entry("sgd", 0.5)], seeds=[0, 1])
    starts = {run.config.seed: run.losses[0] for run in result.summaries[0].results}
    for summary in result.summaries:
        assert {run.config.seed: run.losses[0] for run in summary.results} == starts
    assert [summary.label for summary in result.summaries] == ["SGD, lr 0.2", "Adam", "SGD, lr 0.5"]
    assert len(result.table()) == 6


def test_step_times_are_relative_to_sgd_and_unknown_without_it() -> None:
    with_sgd = compare(WINE, [Entry("sgd"), Entry("adam")], seeds=[0])
    without = compare(WINE, [Entry("adam")], seeds=[0])
    assert with_sgd.summaries[0].relative_step_time == 1
    assert math.isnan(without.summaries[0].relative_step_time)


@pytest.mark.parametrize(("text", "entry"), [("adam", Entry("adam")), (" sgd@0.5 ", Entry("sgd", 0.5))])
def test_a_method_is_read_with_its_learning_rate(text: str, entry: Entry) -> None:
    assert Entry.parse(text) == entry


@pytest.mark.parametrize("text", ["adam@fast", "adam@", "lion"])
def test_a_method_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ExperimentError):
        Entry.parse(text)


def test_the_spread_of_seeds_is_the_sample_standard_deviation() -> None:
    assert Spread.of([1.0, 3.0]) == Spread(2.0, math.sqrt(2))
    assert math.isnan(Spread.of([1.0]).std)


def test_smoothing_is_the_mean_of_the_last_values_and_outlives_an_explosion() -> None:
    assert smoothed([1.0, 2.0, 3.0, 4.0], 2).tolist() == [1.0, 1.5, 2.5, 3.5]
    np.testing.assert_allclose(smoothed([1.0, 1e30, 1.0, 1.0, 0.01, 0.01], 2)[-1], 0.01, rtol=1e-6)
