"""`toy`: the two-dimensional illustration."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest

from ddpnopt.lab.paper import toy
from ddpnopt.lab.paper.item import Context, write


def test_a_quick_run_writes_table_and_picture_and_finds_the_policy_in_the_valley(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toy, "QUICK_NETWORKS", 2)
    context = Context(out=tmp_path, quick=True)
    result = toy.ITEM.run(context)
    folder = write(toy.ITEM, result, context)
    kept = json.loads((folder / "result.json").read_text())
    assert {path.name for path in folder.iterdir()} == {"result.json", "toy.csv", "toy.md", "toy.svg"}
    assert [claim["holds"] for claim in kept["claims"]] == [True, None, None]  # two networks show nothing
    assert all(claim["why"] for claim in kept["claims"][1:])
    assert all(len(line["x"]) == len(line["y"]) for line in kept["pictures"][0]["series"])
    assert "valley" in kept["pictures"][0]["caption"]


def test_with_small_steps_the_feedback_of_second_order_is_the_change_of_the_gradient() -> None:
    cosines = [toy.one_step(seed, 0.02).steering[2] for seed in range(6)]
    assert median(cosines) > 0.99


def test_at_large_learning_rates_gradient_descent_lands_farther_off_than_ddpnopt() -> None:
    found = [toy.one_step(seed, 0.8) for seed in range(12)]
    assert median(each.distance(each.ddp) for each in found) < median(each.distance(each.gd) for each in found)
