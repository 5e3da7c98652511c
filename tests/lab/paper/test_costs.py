"""`table4` and `fig-runtime`: what a step costs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ddpnopt.lab.paper import fig_runtime as runtime
from ddpnopt.lab.paper import table4 as complexity
from ddpnopt.lab.paper.item import Context, write


def test_table4_measures_every_method_beside_its_formula(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"batch": (2,), "width": (4, 8, 16), "depth": (1,)}
    fixed = {"batch": 2, "width": 4, "depth": 1}
    shorter = [replace(each, sizes=sizes, fixed=fixed) for each in complexity.LADDERS]
    monkeypatch.setattr(complexity, "LADDERS", shorter)
    context = Context(out=tmp_path, quick=True)
    result = complexity.ITEM.run(context)
    folder = write(complexity.ITEM, result, context)
    assert (folder / "complexity-large.svg").exists()
    assert (folder / "complexity-small.svg").exists()
    assert (folder / "complexity-dense.svg").exists()
    rows = result.tables[0].frame.set_index(["method", "measured on"])
    # Memory, unlike time, is the same on a busy machine.
    growth = rows["memory, X"].str.split(" / ").str[0].astype(float)
    for ours, where in (("vanilla DDP, no Jacobians", "small networks"), ("vanilla DDP", complexity.DENSE.name)):
        assert growth[ours, where] > growth["DDPNOpt", where] + 0.5
    assert [claim.holds for claim in result.claims] == [None] * 4


def test_the_runtime_of_every_method_is_measured_and_vanilla_ddp_takes_most_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "SETTINGS", runtime.SETTINGS[-1:])
    monkeypatch.setattr(runtime, "QUICK_BATCH", 2)
    context = Context(out=tmp_path, quick=True)
    result = runtime.ITEM.run(context)
    rows = result.tables[0].frame.set_index("method")
    memory = rows["peak memory (MB)"].astype(float)
    assert set(rows.index) == {
        "SGD", "RMSprop", "Adam", "EKFAC", "DDPNOpt (RMSprop)", "DDPNOpt", "E-MSA", "vanilla DDP",
    }  # fmt: skip
    assert memory.idxmax() == "vanilla DDP"
    folder = write(runtime.ITEM, result, context)
    assert len(json.loads((folder / "result.json").read_text())["pictures"][0]["series"]) == 2 * len(rows)


def test_every_network_of_the_runtime_figure_can_be_built_and_run() -> None:
    for setting in runtime.SETTINGS:
        x, _ = setting.network.batch(2)
        assert setting.network.build()(x).shape == (2, 10)
