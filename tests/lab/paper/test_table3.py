"""Table 3: what is tuned and trained, and its verdicts."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from paper_runs import outcome, reproduce

from ddpnopt.lab.paper.item import Context
from ddpnopt.lab.paper.item_runs import SeedRuns
from ddpnopt.lab.paper.table3 import best_claim, ocp_claim
from ddpnopt.lab.paper.table3_columns import COLUMNS, Column, Size, columns
from ddpnopt.lab.paper.table3_runs import TunedMethod, measure
from ddpnopt.lab.runs.store import STORE, Store


def test_learning_rates_are_chosen_on_held_out_data_within_the_papers_ranges(tmp_path: Path) -> None:
    context = Context(tmp_path)
    short = Size(5)
    column = Column(
        "wine", "WINE", "wine", "fcn", 8, short, short, Size(1), short, seeds=1, tuning_seeds=2, rates=3, paper=()
    )
    methods = ("adam", "sgd-m", "emsa")
    adam, sgd, emsa = measure(context, column, methods)
    keys = [json.loads(key) for key in Store(tmp_path / STORE).keys()]  # noqa: SIM118
    trials = [key for key in keys if key["validation"]]
    assert len(trials) == 3 * 2 + 3 * 3 * 2
    assert len(keys) - len(trials) == 3, "one run of each method sees the test set"
    assert adam.config.lr is not None
    assert 7e-4 <= adam.config.lr <= 1e-2
    assert (adam.tried, sgd.tried, emsa.tried) == (3, 9, 0)
    assert sgd.config.options["momentum"] in (0.0, 0.5, 0.9)
    assert emsa.config == column.config("emsa", short)
    # the best of its trials, and the same when the search is repeated
    values: dict[float, list[float]] = {}
    for key, found in ((json.loads(k), o) for k, o in Store(tmp_path / STORE).outcomes().items()):
        if key["method"] == "adam" and key["validation"]:
            values.setdefault(key["lr"], []).append(found.accuracy)
    assert set(values) == {0.0007, 0.00265, 0.01}
    assert sum(values[adam.config.lr]) == max(map(sum, values.values()))
    assert measure(context, column, methods)[0] == adam


def test_slow_methods_are_compared_with_ddpnopt_at_the_same_size_and_seeds(tmp_path: Path) -> None:
    short = Size(3)
    column = Column(
        "wine", "WINE", "wine", "fcn", 32, short, short, Size(2), short, seeds=3, tuning_seeds=1, rates=2,
        paper=COLUMNS[0].paper,
    )  # fmt: skip
    found = measure(Context(tmp_path), column, ("emsa", "ddpnopt-rmsprop"), size=column.slow, seeds=column.slow_seeds)
    assert [each.seeds.task.epochs for each in found] == [2, 2]
    assert [len(each.seeds.runs) for each in found] == [3, 3]
    assert ocp_claim(found).text == "WINE: DDPNOpt outperforms E-MSA"
    by_name = {each.name: each for each in COLUMNS}
    assert by_name["digits"].config("vanilla-ddp", short).options == {"damping": 30.0}
    assert all(each.slow.epochs > 1 for each in COLUMNS)


def test_whole_image_sets_have_three_seeds_unless_a_number_is_given(tmp_path: Path) -> None:
    def seeds(given: int | None) -> list[int]:
        context = Context(tmp_path, full=True, seeds=given, datasets=("digits", "mnist-fcn"))
        return [each.seeds for each in columns(context)]

    assert seeds(None) == [10, 3]
    assert seeds(8) == [8, 8]


def test_our_own_form_stands_next_to_the_papers_methods_and_takes_part_in_no_claim(tmp_path: Path) -> None:
    result = reproduce("table3", "--quick", "--datasets", "wine", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    accuracy = pd.read_csv(tmp_path / "table3" / "accuracy.csv")
    assert list(accuracy.columns)[-2:] == ["DDPNOpt", "DDPNOpt(model)"]
    assert "(" not in accuracy["DDPNOpt(model)"][0], "the paper has no figure for it"
    assert "DDPNOpt(model)" not in "".join(pd.read_csv(tmp_path / "table3" / "ordering.csv").astype(str).sum())
    claims = json.loads((tmp_path / "table3" / "result.json").read_text(encoding="utf-8"))["claims"]
    assert all("DDPNOpt(model)" not in claim["ours"] for claim in claims)


def tuned(method: str, accuracies: list[float], epochs: int = 2, diverged: int = 0, loss: float = 0.1) -> TunedMethod:
    column = COLUMNS[0]
    runs = [outcome(each, loss) for each in accuracies[diverged:]] + [outcome(math.nan, math.nan, True)] * diverged
    task = replace(column.task(column.size), epochs=epochs, n_train=100)
    return TunedMethod(column, method, column.config(method, column.size), 1, SeedRuns(runs, task))


def test_the_most_accurate_method_is_judged_seed_by_seed_with_errors() -> None:
    others = [tuned(name, [90.0, 92.0, 94.0]) for name in ("sgd-m", "rmsprop", "adam", "ekfac")]

    def holds(*mine: float) -> bool | None:
        return best_claim([*others, tuned("ddpnopt-rmsprop", list(mine))]).holds

    # the seeds differ by more than the methods, but all in the same way
    assert holds(90.5, 92.4, 94.5) is True
    assert holds(89.5, 91.6, 93.5) is False
    assert holds(93.0, 91.0, 94.0) is None


@pytest.mark.parametrize(
    ("rival", "holds"),
    [
        (tuned("emsa", [80.0, 81.0, 80.5]), True),
        (tuned("emsa", [80.0]), None),
        (tuned("emsa", [80.0, 81.0, 80.5], epochs=1), None),
        (tuned("emsa", [80.0, 81.0, 80.5], diverged=1), None),
        (tuned("emsa", [33.0, 34.0, 33.5], loss=1.05), None),  # guessing among three classes is log 3
        (tuned("emsa", [95.0, 96.0, 95.5]), False),
        (tuned("emsa", [95.0, 96.0, 95.5], loss=1.05), False),
    ],
)
def test_there_is_no_win_against_a_rival_with_one_epoch_or_fewer_than_three_seeds_on_which_it_learned(
    rival: TunedMethod, holds: bool | None
) -> None:
    claim = ocp_claim([rival, tuned("ddpnopt-rmsprop", [90.0, 91.0, 90.6])])
    assert claim.holds is holds
    assert bool(claim.why) == (holds is not True)


def test_a_rival_is_beaten_on_the_seeds_on_which_it_learned_and_the_others_are_named() -> None:
    rival = tuned("emsa", [0.0, 80.0, 81.0, 80.5], diverged=1)
    claim = ocp_claim([rival, tuned("ddpnopt-rmsprop", [90.0, 91.0, 90.6, 90.2])])
    assert claim.holds is True
    assert "did not learn: 1 of E-MSA" in claim.ours


def test_columns_can_be_chosen_and_an_unknown_one_is_an_error(tmp_path: Path) -> None:
    chosen = columns(Context(tmp_path, datasets=("mnist", "wine")))
    assert [each.name for each in chosen] == ["wine", "mnist-fcn", "mnist-cnn"]
    result = reproduce("table3", "--datasets", "imagenet", "--out", str(tmp_path))
    assert result.exit_code == 2
    assert "cifar10-cnn" in result.stderr
    assert [c.seeds for c in COLUMNS] == [10, 10, 5, 5, 3, 3, 3]
    full = columns(Context(tmp_path, full=True))
    assert all(each.size.n_train is None for each in full)
    images = [each for each in full if each.images]
    assert all((each.slow == each.whole) != each.convolutional for each in images), "E-MSA on all of them, but for CNNs"
    assert all(each.tuning.n_train is not None and each.seeds == 3 for each in images)
    assert {each.batch_size for each in images} == {32, 128}
