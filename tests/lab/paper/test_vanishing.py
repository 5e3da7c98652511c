"""`fig-vanishing`: nine sigmoid layers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ddpnopt.lab.paper import fig_vanishing as vanishing
from ddpnopt.lab.paper.fig_vanishing_runs import VanishingCase, VanishingEffort, VanishingRun, train
from ddpnopt.lab.paper.item import Context, write

SHORT = VanishingEffort(epochs=2, lrs=(0.03,), n_train=32)


def test_a_quick_run_has_every_variant_and_decides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vanishing, "QUICK", SHORT)
    context = Context(out=tmp_path, quick=True)
    result = vanishing.ITEM.run(context)
    assert [claim.holds for claim in result.claims] == [None] * 8
    rows = result.tables[0].frame
    assert set(rows["method"]) == {
        "SGD", "SGD-VGR", "EKFAC", "DDPNOpt", "DDPNOpt2nd", "Adam", "RMSprop", "DDPNOpt*",
    }  # fmt: skip
    assert set(zip(rows["loss"], rows["activation"], strict=True)) == {
        ("MMC", "sigmoid"), ("CE", "sigmoid"), ("MMC", "ReLU"),
    }  # fmt: skip
    folder = write(vanishing.ITEM, result, context)
    for name in ("vanishing", "vanishing-variants", "vanishing-rates"):
        assert (folder / f"{name}.svg").stat().st_size > 10_000
    assert "NaN" not in (folder / "result.json").read_text()
    assert json.loads((folder / "result.json").read_text())["pictures"][0]["series"]


def test_the_gradients_vanish_with_sigmoids_and_not_with_relus() -> None:
    norms = {
        activation: train(VanishingCase("SGD", 0.1, activation=activation), 0, SHORT).norms.mean(0)
        for activation in ("sigmoid", "ReLU")
    }
    assert norms["sigmoid"][0] < 1e-5 * norms["sigmoid"][-1]
    assert norms["ReLU"][0] > 1e-4 * norms["ReLU"][-1]


def test_claims_follow_the_numbers() -> None:
    def runs(mine: float, theirs: float) -> vanishing.VanishingRuns:
        wanted = [*vanishing.main_cases(), *vanishing.variants(objective="CE"), *vanishing.adaptive_cases()]
        wanted += [*vanishing.variants(activation="ReLU"), *vanishing.tuning_cases((0.03, 0.1))]
        return vanishing.VanishingRuns(
            {case: [made(case, mine if "DDPNOpt" in case.way else theirs)] for case in wanted}
        )

    def made(case: VanishingCase, loss: float) -> VanishingRun:
        plateau = 50.0 if case.objective == "MMC" else 2.3
        size = 10.0 if case.way == "DDPNOpt" else 1.0
        loss = loss - (0.1 if case.way == "DDPNOpt2nd" else 0.0)
        return VanishingRun(case, np.full(600, loss * plateau), np.full((600, 9), size), 50.0, 100, False)

    effort = replace(SHORT, lrs=(0.03, 0.1))
    as_in_paper = [claim.holds for claim in vanishing.judge(runs(mine=0.5, theirs=1.0), effort)]
    assert as_in_paper[:5] == [True] * 5
    reversed_roles = [claim.holds for claim in vanishing.judge(runs(mine=1.05, theirs=0.5), effort)]
    assert reversed_roles[:4] == [False] * 4
