"""The training loop of the suite: learning, failures, averaged weights, the script that compares methods."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

from ddpnopt.lab.suite import TASKS, train
from ddpnopt.lab.suite.try_methods import main, method


def adam(model: nn.Module) -> Adam:
    return Adam(model.parameters(), lr=1e-2)


def test_adam_learns_and_the_outcome_says_what_happened() -> None:
    outcome = train(TASKS["wine"], adam, seed=0)
    assert not outcome.diverged
    assert len(outcome.losses) == TASKS["wine"].steps
    assert outcome.final_loss < outcome.losses[0]
    assert outcome.test < outcome.chance
    assert outcome.seconds > 0
    assert outcome.seconds_per_step == pytest.approx(outcome.seconds / len(outcome.losses))


def test_the_same_seed_gives_the_same_run() -> None:
    one, two = (train(TASKS["vae"], adam, seed=1, steps=5) for _ in range(2))
    assert one.losses == two.losses
    assert one.test == two.test
    assert train(TASKS["vae"], adam, seed=2, steps=5).losses != one.losses


def test_divergence_is_recorded_and_gets_the_metric_of_chance() -> None:
    outcome = train(TASKS["noisy_table"], lambda model: SGD(model.parameters(), lr=1e6), seed=0, steps=50)
    assert outcome.diverged
    assert "loss" in outcome.failure
    assert len(outcome.losses) < 50
    assert outcome.test == outcome.chance


def test_an_exception_of_the_optimizer_is_recorded() -> None:
    class Failing(SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            raise RuntimeError("no step today")

    outcome = train(TASKS["wine"], lambda model: Failing(model.parameters(), lr=0.1), seed=0, steps=5)
    assert outcome.failure == "RuntimeError: no step today"
    assert outcome.test == outcome.chance


def test_weights_that_are_not_finite_at_the_end_are_a_failure() -> None:
    class Breaking(SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"]:
                    parameter.fill_(math.nan)

    outcome = train(TASKS["noisy_table"], lambda model: Breaking(model.parameters(), lr=0.1), seed=0, steps=1)
    assert outcome.failure == "the metric is not finite"


def test_optimizers_with_averaged_weights_are_switched_around_the_evaluation() -> None:
    calls: list[str] = []

    class Averaging(SGD):
        def train(self) -> None:
            calls.append("train")

        def eval(self) -> None:
            calls.append("eval")

        def step(self, closure: object = None) -> None:  # type: ignore[override]
            calls.append("step")
            super().step()

    train(TASKS["wine"], lambda model: Averaging(model.parameters(), lr=0.1), seed=0, steps=2)
    assert calls == ["train", "step", "step", "eval", "train"]


def test_methods_by_name_and_by_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_prototype.py").write_text(
        "import torch\ndef make(model):\n    return torch.optim.SGD(model.parameters(), lr=0.25)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    model = nn.Linear(2, 2)
    assert method("my_prototype:make")(model).param_groups[0]["lr"] == 0.25
    assert method("adam:1e-3")(model).param_groups[0]["lr"] == 1e-3
    assert isinstance(method("sgd:0.5")(model), SGD)
    with pytest.raises(ValueError, match="neither"):
        method("prodigy")


def test_the_script_prints_a_row_per_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "outcomes.json"
    main(["--tasks", "wine,noisy_table", "--methods", "adam:1e-3", "--steps", "3", "--json", str(target)])
    rows = capsys.readouterr().out.splitlines()[1:]
    assert sorted(row.split()[0] for row in rows) == ["noisy_table", "wine"]
    assert {len(outcome["losses"]) for outcome in json.loads(target.read_text())} == {3}


def test_the_script_names_unknown_tasks() -> None:
    with pytest.raises(SystemExit, match="no_such_task"):
        main(["--tasks", "no_such_task"])
