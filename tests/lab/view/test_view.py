"""`ddpnopt view`: a recorded training as curves in the terminal and on a page, and what it seems to suffer from."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn
from typer.testing import CliRunner, Result

from ddpnopt import DDPNOpt, OptionError
from ddpnopt.lab.cli import app
from ddpnopt.lab.cli.view import shown_now
from ddpnopt.lab.view.curves import CurveLine, binned, panels
from ddpnopt.lab.view.run_log import RunLog, read_log
from ddpnopt.lab.view.symptoms import symptoms
from ddpnopt.lab.view.terminal import plot, view
from ddpnopt.logging import Recorder


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def train(opt: torch.optim.Optimizer, model: nn.Module, log: Recorder, steps: int) -> None:
    for _ in range(steps):
        opt.zero_grad()
        loss = F.cross_entropy(model(torch.randn(16, 4)), torch.arange(16) % 3)
        loss.backward()
        opt.step()
        log(loss)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    model = network()
    opt = DDPNOpt(model, diagnostics=True)
    path = tmp_path / "deep" / "run.jsonl"
    with Recorder(opt, path) as log:
        train(opt, model, log, 25)
    return path


def show(*arguments: str, width: int = 160) -> Result:
    return CliRunner(env={"COLUMNS": str(width), "TERM": "dumb"}).invoke(app, ["view", *arguments])


def made(steps: int = 40, **columns: Any) -> RunLog:
    """A made-up run: numbers, or functions of the step."""
    about = {key: columns.pop(key) for key in ("kind", "open_loop") if key in columns}
    numbers = {
        name.replace("__", "/"): [value(i) if callable(value) else value for i in range(steps)]
        for name, value in columns.items()
    }
    return RunLog("made", list(range(1, steps + 1)), numbers, about.get("kind"), about.get("open_loop", ()))


def test_every_step_is_a_line_with_the_numbers_of_the_report(file: Path) -> None:
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 26))
    for name in ("loss", "seconds", "predicted", "actual", "fraction", "kappa", "undone", "layers/2/update"):
        assert all(isinstance(line[name], float) for line in lines), name
    assert lines[0]["about"] == {"kind": "cross_entropy", "open_loop": []}
    assert "about" not in lines[1]


def test_a_continued_training_replaces_the_steps_that_it_repeats(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    model = network()
    opt = DDPNOpt(model)
    with Recorder(opt, path) as log:
        train(opt, model, log, 6)
        saved = opt.state_dict()
        train(opt, model, log, 4)
    again = DDPNOpt(model)
    again.load_state_dict(saved)
    with Recorder(again, path) as log:
        train(again, model, log, 2)
    assert read_log(path).steps == [1, 2, 3, 4, 5, 6, 7, 8]


def test_another_optimizer_is_recorded_by_its_loss(tmp_path: Path) -> None:
    model = network()
    opt = torch.optim.Adam(model.parameters())
    with Recorder(opt, tmp_path / "adam.jsonl", every=2) as log:
        train(opt, model, log, 6)
    found = read_log(tmp_path / "adam.jsonl")
    assert found.steps == [2, 4, 6]
    assert [panel.name for panel in panels(found)] == ["loss"]


def test_a_loss_that_is_not_finite_is_a_gap_and_a_period_of_no_steps_is_refused(tmp_path: Path) -> None:
    opt = torch.optim.SGD(network().parameters(), lr=0.1)
    with Recorder(opt, tmp_path / "run.jsonl") as log:
        log(float("nan"))
        log(1.0)
    assert read_log(tmp_path / "run.jsonl").columns["loss"] == [None, 1.0]
    with pytest.raises(OptionError, match="every=0"):
        Recorder(opt, tmp_path / "other.jsonl", every=0)


@pytest.mark.parametrize("width", [60, 160])
def test_the_terminal_shows_every_curve_within_its_width(file: Path, width: int) -> None:
    result = show(str(file), width=width)
    assert result.exit_code == 0, result.output
    for word in ("step 25", "cross_entropy", "Loss of the batch", "kappa", "predicted", "Size of each layer"):
        assert word in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= width
    assert len(re.findall(r"[\u2801-\u28ff]", result.stdout)) > 100


def test_a_plot_rises_from_the_lower_left_to_the_upper_right() -> None:
    rows = plot(range(1, 41), [CurveLine("up", [float(i) for i in range(40)])], 20, rows=5).plain.splitlines()
    assert rows[0].split("┤")[1].rstrip("\u2800")[-1] != "\u2800"
    assert rows[0].split("┤")[1][0] == "\u2800"
    assert rows[4].split("┤")[1][0] != "\u2800"
    assert rows[0].split()[0] == "39"
    assert rows[4].split()[0] == "0"


def test_a_long_run_is_shown_by_means_over_equal_stretches() -> None:
    places, means = binned(range(1, 1001), [float(i) for i in range(1000)], 10)
    assert places == list(range(100, 1001, 100))
    assert means == [100 * i + 49.5 for i in range(10)]
    assert binned([1, 2, 3, 4], [None, None, 1.0, 3.0], 2) == ([2, 4], [None, 2.0])


def test_the_page_is_one_file_with_every_curve(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "page" / "run.html"
    result = show(str(file), "--page", str(out))
    assert result.exit_code == 0, result.output
    text = out.read_text(encoding="utf-8")
    charts = [json.loads(found) for found in re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', text)]
    names = [panel.name for panel in panels(read_log(file))]
    assert len(charts) == len(names) >= 6
    for name in names:
        assert f'id="{name}"' in text
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert [line["label"] for line in charts[names.index("layers")]["panels"][0]["lines"]] == ["0", "2", "4"]


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ("", "no step yet"),
        ("hello\n", "line 1 is not JSON"),
        ('{"step": 1}\n[1]\n', "line 2 has no step"),
    ],
)
def test_a_file_that_is_no_record_is_told_by_its_line(tmp_path: Path, content: str, word: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(content, encoding="utf-8")
    result = show(str(path))
    assert result.exit_code == 2
    assert word in result.stderr
    assert show(str(tmp_path / "none.jsonl")).exit_code == 2


def test_on_a_screen_the_remarks_stand_before_the_curves_and_the_curves_are_lower(file: Path) -> None:
    log = read_log(file)
    worse = replace(log, columns={**log.columns, "skipped": [float(step) for step in log.steps]})

    def lines(height: int | None) -> list[str]:
        console = Console(width=80, file=io.StringIO(), record=True)
        console.print(view(worse, 80, height))
        return console.export_text().splitlines()

    low, whole = lines(24), lines(None)
    assert any("Skipped steps" in line for line in low[:5])
    assert any("Skipped steps" in line for line in whole[-5:])
    assert len(low) < len(whole)
    assert sum("╭" in line for line in low) == sum("╭" in line for line in whole)


def test_a_viewer_that_follows_waits_for_a_file_and_its_first_step(tmp_path: Path, file: Path) -> None:
    path = tmp_path / "later.jsonl"
    screen = Console(width=80, height=24)
    assert "waiting for the first step" in str(shown_now(path, screen))
    path.write_text("", encoding="utf-8")
    assert "waiting for the first step" in str(shown_now(path, screen))
    path.write_bytes(file.read_bytes())
    assert not isinstance(shown_now(path, screen), str)


def test_a_line_that_is_being_written_is_left_out(file: Path) -> None:
    with file.open("a", encoding="utf-8") as out:
        out.write('{"step": 26, "lo')
    assert read_log(file).steps[-1] == 25


WELL: dict[str, Any] = {
    "loss": lambda i: 2.0 - 0.04 * i,
    "predicted": -0.1,
    "actual": -0.09,
    "fraction": 0.1,
    "kappa": 1.2,
    "shortened": 0.0,
    "undone": 0.0,
    "skipped": 0.0,
    **{f"layers__{name}__update": 0.1 for name in "abc"},
}


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({}, None),
        ({"skipped": 1.0}, "Skipped steps"),
        ({"undone": 3.0}, "Undone steps"),
        ({"shortened": 6.0}, "Repeated steps"),
        ({"kappa": 300.0}, "Strongly curved"),
        ({"fraction": 1e-5}, "Small steps"),
        ({"actual": -0.001}, "Promises not kept"),
        ({"actual": 0.05}, "Promises not kept"),
        ({"loss": 1.0}, "Loss does not fall"),
        ({"layers__b__update": 1e-6}, "Layers that stand still"),
        ({"kind": "unknown"}, "Loss not recognised"),
        ({"open_loop": ["rnn.weight_hh_l0"]}, "Parameters without feedback"),
    ],
)
def test_each_symptom_is_seen_alone_and_a_healthy_run_has_none(changed: dict[str, Any], name: str | None) -> None:
    found = symptoms(made(**{**WELL, **changed}))
    assert [each.name for each in found] == ([] if name is None else [name])


def test_every_symptom_has_its_place_in_the_documentation() -> None:
    source = (Path(__file__).parents[3] / "src/ddpnopt/lab/view/symptoms.py").read_text(encoding="utf-8")
    page = (Path(__file__).parents[3] / "docs" / "trouble.md").read_text(encoding="utf-8")
    names = re.findall(r'Symptom\(\s*"([^"]+)"', source)
    assert len(names) == 10
    for name in names:
        assert f"\n## {name}\n" in page, name
