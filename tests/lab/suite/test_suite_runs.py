"""The suite's tasks in the run machinery: the same runs as a loop by hand, processes, store, search."""

from __future__ import annotations

import math
import os
import pickle
import subprocess
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.optim import Adam

from ddpnopt.lab.errors import ExperimentError, UnknownNameError
from ddpnopt.lab.runs import bfloat16
from ddpnopt.lab.runs.config import RunConfig
from ddpnopt.lab.runs.search import candidates, counted, search
from ddpnopt.lab.runs.store import Store
from ddpnopt.lab.runs.sweep import collect
from ddpnopt.lab.runs.training import perform, train
from ddpnopt.lab.suite import TASKS, variants
from ddpnopt.lab.suite import definition as definitions
from ddpnopt.lab.suite.runs import SuiteRunTask


@pytest.mark.parametrize("name", ["vae", "smoothing_and_augmentation", "mean_and_variance"])
def test_a_run_is_that_of_a_loop_by_hand(name: str) -> None:
    problem = TASKS[name].build(2)
    optimizer = Adam(problem.model.parameters(), lr=3e-3)
    torch.manual_seed(2)
    batches = problem.batches(torch.Generator().manual_seed(2))
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = problem.loss(next(batches))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    config = RunConfig("adam", SuiteRunTask(name, 6), 3e-3, seed=2)
    test, validation = train(config), train(replace(config, validation=True))
    assert test.details is not None
    assert test.details.record.losses == losses
    assert test.metric == problem.evaluate("test")
    assert validation.metric == problem.evaluate("validation")
    assert test.train_loss == losses[-1]


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


def test_the_key_follows_the_definition_and_not_its_wording() -> None:
    source = 'def f(x):\n    """Doubles."""\n    return 2 * x  # why not\n'
    reworded = 'def f(x):\n    """Twice as much."""\n\n    return (2 * x)\n'
    assert definitions.statements(source) == definitions.statements(reworded)
    assert definitions.statements(source) != definitions.statements(source.replace("2 *", "3 *"))
    sealed = '@suite_task("labels", steps=3, sealed=True)\ndef f(): ...\n'
    assert definitions.statements(sealed) == definitions.statements(sealed.replace(", sealed=True", ""))
    assert definitions.statements(sealed) != definitions.statements(sealed.replace("steps=3", "steps=4"))
    assert RunConfig("adam", SuiteRunTask("wine")).settings["definition"] == definitions.definition("wine")


def test_the_definition_covers_what_a_task_is_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {module.__name__.rpartition(".")[2] for module in definitions.closure(variants)}
    assert parts == {"data", "fully_connected", "measures", "task", "variants", "vision"}
    assert {definitions.definition(task.name) for task in variants.TASKS} == {definitions.definition("multi_label")}
    assert definitions.definition("survival") != definitions.definition("multi_label")
    original = definitions.inspect.getsource

    def edited(module: ModuleType) -> str:
        return original(module).replace("0.3", "0.4") if module.__name__.endswith(".data") else original(module)

    before = definitions.definition("whole_set")
    monkeypatch.setattr(definitions.inspect, "getsource", edited)
    assert definitions.definition.__wrapped__("whole_set") != before


def test_muon_does_not_apply_where_no_weight_is_a_matrix(tmp_path: Path) -> None:
    assert perform(RunConfig("muon", SuiteRunTask("unet_shapes", 2))) is None
    store = Store(tmp_path / "runs.sqlite")
    wanted = [RunConfig("muon", SuiteRunTask(name, 2)) for name in ("photo_denoising", "wine")]
    assert list(collect(wanted, store, jobs=2)) == wanted[1:], "bfloat16 products work in the processes"


@pytest.mark.parametrize(("status", "expected"), [(0, None), (-4, "AVX512_CORE_BF16")])
def test_amx_is_switched_off_only_where_a_product_dies(
    monkeypatch: pytest.MonkeyPatch, status: int, expected: str | None
) -> None:
    calls: list[list[str]] = []

    def probed(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        calls.append(command)
        return subprocess.CompletedProcess(command, status)

    monkeypatch.delenv(bfloat16.VARIABLE, raising=False)
    monkeypatch.setattr(bfloat16.subprocess, "run", probed)
    bfloat16.allow_bfloat16.__wrapped__()
    assert os.environ.get(bfloat16.VARIABLE) == expected
    assert len(calls) == 1
    monkeypatch.setenv(bfloat16.VARIABLE, "AVX2")
    bfloat16.allow_bfloat16.__wrapped__()
    assert (os.environ[bfloat16.VARIABLE], len(calls)) == ("AVX2", 1)
