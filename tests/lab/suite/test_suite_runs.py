"""The suite's tasks in the run machinery: the same runs as the suite's own loop, processes, store, search."""

from __future__ import annotations

import math
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import Adam

from ddpnopt.lab.errors import ExperimentError, UnknownNameError
from ddpnopt.lab.runs.config import RunConfig
from ddpnopt.lab.runs.search import candidates, counted, search
from ddpnopt.lab.runs.store import Store
from ddpnopt.lab.runs.sweep import collect
from ddpnopt.lab.runs.training import train
from ddpnopt.lab.suite import TASKS
from ddpnopt.lab.suite import train as train_directly
from ddpnopt.lab.suite.runs import SuiteRunTask


def adam(model: nn.Module) -> Adam:
    return Adam(model.parameters(), lr=3e-3)


@pytest.mark.parametrize("name", ["vae", "smoothing_and_augmentation", "mean_and_variance"])
def test_a_run_is_that_of_the_suites_own_loop(name: str) -> None:
    direct = train_directly(TASKS[name], adam, seed=2, steps=6)
    test = train(RunConfig("adam", SuiteRunTask(name, 6), 3e-3, seed=2))
    validation = train(RunConfig("adam", SuiteRunTask(name, 6), 3e-3, seed=2, validation=True))
    assert test.details is not None
    assert test.details.record.losses == direct.losses
    assert (validation.metric, test.metric) == (direct.validation, direct.test)
    assert test.train_loss == pytest.approx(direct.final_loss)


def test_runs_go_through_two_processes_into_the_store(tmp_path: Path) -> None:
    wanted = [
        RunConfig(method, SuiteRunTask(name, 20)) for name in ("wine", "noisy_table") for method in ("adam", "ddpnopt")
    ]
    store = Store(tmp_path / "runs.sqlite")
    found = collect(wanted, store, jobs=2)
    assert list(found) == wanted
    assert all(outcome.steps == 20 and not outcome.diverged for outcome in found.values())
    assert collect(wanted, store, jobs=0) == found, "the second call takes all from the store"


def test_a_search_judges_on_the_validation_split(tmp_path: Path) -> None:
    task = SuiteRunTask("wine", 40)
    store = Store(tmp_path / "runs.sqlite")
    [ranked] = search([candidates(RunConfig("adam", task), 3)], 1, lambda runs: list(collect(runs, store).values()))
    assert not task.higher_is_better
    assert ranked[0].metric == min(each.metric for each in ranked)
    best = RunConfig("adam", task, ranked[0].config.lr, validation=True)
    assert train(best).metric == ranked[0].metric


def test_a_run_that_diverges_counts_as_chance() -> None:
    task = SuiteRunTask("noisy_table", 50)
    outcome = train(RunConfig("sgd", task, 1e6), record_errors=True)
    assert outcome.diverged
    assert counted(outcome, task) == task.untrained
    assert task.untrained.metric == TASKS["noisy_table"].build(0).chance


@pytest.mark.parametrize("name", TASKS)
def test_the_untrained_loss_is_finite_and_draws_nothing_from_the_global_generator(name: str) -> None:
    state = torch.random.get_rng_state()
    assert math.isfinite(SuiteRunTask(name).untrained.loss)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_the_key_has_the_name_and_the_length() -> None:
    own = TASKS["wine"].steps
    assert RunConfig("adam", SuiteRunTask("wine")).key == RunConfig("adam", SuiteRunTask("wine", own)).key
    others = [SuiteRunTask("wine", own + 1), SuiteRunTask("noisy_table", own)]
    assert len({RunConfig("adam", task).key for task in [SuiteRunTask("wine"), *others]}) == 3
    assert pickle.loads(pickle.dumps(others[0])) == others[0]


def test_unknown_names_and_lengths_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="unknown task 'no_such_task'"):
        SuiteRunTask("no_such_task")
    with pytest.raises(ExperimentError, match="at least 1"):
        SuiteRunTask("wine", 0)
