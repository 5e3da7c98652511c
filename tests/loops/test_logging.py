"""The diagnostics, printed and in a real event file."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ddpnopt import DDPNOpt, OptionError
from ddpnopt.logging import Printer, TensorBoard, numbers


def steps(opt: DDPNOpt, model: nn.Module, count: int, after: object = None) -> list[dict[str, float]]:
    seen = []
    for _ in range(count):
        opt.zero_grad()
        F.cross_entropy(model(torch.randn(8, 4)), torch.arange(8) % 3).backward()
        opt.step()
        if callable(after):
            after()
        seen.append(numbers(opt.report))
    return seen


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def test_an_event_file_holds_the_numbers_of_every_step(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    model = network()
    opt = DDPNOpt(model, diagnostics=True)
    with TensorBoard(opt, tmp_path, every=2) as log:
        seen = steps(opt, model, 4, log)
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {f"ddpnopt/{name}" for name in seen[-1]}
    assert {"predicted", "actual", "layers/2/feedback"} <= seen[-1].keys()
    for name in seen[-1]:
        found = [(e.step, e.value) for e in events.Scalars(f"ddpnopt/{name}")]
        assert [step for step, _ in found] == [2, 4]
        assert [value for _, value in found] == pytest.approx([seen[1][name], seen[3][name]], rel=1e-6)


def test_the_printer_tells_the_step_the_prediction_and_each_layer() -> None:
    model, out = network(), io.StringIO()
    opt = DDPNOpt(model, diagnostics=True)
    steps(opt, model, 3, Printer(opt, every=3, file=out))
    lines = out.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("step 3: predicted=-")
    assert f"actual={opt.report.actual:.4g}" in lines[0]
    assert lines[2].startswith("  2: update ")


def test_without_diagnostics_the_counters_remain() -> None:
    model = network()
    opt = DDPNOpt(model)
    counters = {"shortened": 0.0, "undone": 0.0, "planned": 0.0, "skipped": 0.0}
    assert steps(opt, model, 1)[0] == {**counters, "fraction": opt.report.fraction, "kappa": opt.report.kappa}
    assert steps(DDPNOpt(model, lr=3), model, 1)[0] == counters, "a fixed damping asks for nothing"


def test_a_period_of_no_steps_is_refused() -> None:
    with pytest.raises(OptionError, match="every=0"):
        Printer(DDPNOpt(network()), every=0)
