"""`ddpnopt compare my_task.py` and `ddpnopt.lab.compare`: the user's own model, data and loss."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner, Result

from ddpnopt.lab import compare
from ddpnopt.lab.cli import app
from ddpnopt.lab.comparison import own
from ddpnopt.lab.comparison.own_task import OwnTask
from ddpnopt.lab.comparison.task_file import near_misses, read_task
from ddpnopt.lab.errors import TaskError
from ddpnopt.lab.runs import store

EXAMPLE = Path(__file__).parents[3] / "examples" / "compare" / "my_task.py"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return Path(shutil.copy(EXAMPLE, tmp_path / "my_task.py"))


def run(file: Path, *options: str) -> Result:
    out = file.parent / "out"
    arguments = ["compare", str(file), "--steps", "12", "--seeds", "1", "--out", str(out), *options]
    return CliRunner(env={"COLUMNS": "160", "TERM": "dumb"}).invoke(app, arguments)


def edited(file: Path, old: str, new: str) -> Path:
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new), encoding="utf-8")
    return file


def line_of(file: Path, start: str) -> int:
    lines = file.read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, start=1) if line.strip().startswith(start))


def assert_told(result: Result, *words: str) -> None:
    """One line on standard error, without a traceback, and nothing trained."""
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("ddpnopt: ")
    assert result.stderr.count("\n") == 1, result.stderr
    for word in words:
        assert word in result.stderr, result.stderr


def test_a_file_is_compared_and_gives_a_table_a_picture_and_numbers(file: Path) -> None:
    result = run(file)
    assert result.exit_code == 0, result.output
    for word in ("DDPNOpt", "automatic", "Adam", "SGD-m", "test accuracy %", "best of 5 rates"):
        assert word in result.stdout
    out = file.parent / "out"
    assert Image.open(out / "compare-my_task.png").size[0] > 1000
    numbers = pd.read_csv(out / "compare-my_task.csv")
    assert list(numbers.method) == ["ddpnopt", "adam", "sgd-m", "adamw"]
    assert (numbers.steps == 12).all()
    assert numbers.metric.between(30, 100).all()


def test_kept_runs_are_used_until_the_file_changes_or_a_fresh_start_is_asked_for(file: Path) -> None:
    options = ("--methods", "ddpnopt,adam@0.01")
    assert "earlier call" not in run(file, *options).stderr
    assert "2 runs of an earlier call" in run(file, *options).stderr
    assert "earlier call" not in run(file, *options, "--fresh").stderr
    assert "earlier call" in run(edited(file, "steps = 200", "steps = 200  # or more"), *options).stderr
    assert "earlier call" not in run(edited(file, "nn.ReLU()", "nn.Tanh()"), *options).stderr


def test_an_interrupted_comparison_goes_on_with_the_run_that_was_missing(file: Path) -> None:
    run(file, "--methods", "adam@0.01")
    result = run(file, "--methods", "adam@0.01,sgd-m@0.1")
    assert "1 run of an earlier call" in result.stderr
    assert "my_task, sgd-m, lr 0.1, seed 0" in result.stderr
    assert "my_task, adam" not in result.stderr


def test_an_interruption_says_how_to_continue(file: Path) -> None:
    edited(file, "    inputs, labels = batch\n", "    inputs, labels = batch\n    raise KeyboardInterrupt\n")
    result = run(file)
    assert result.exit_code == 130
    assert "the same command continues" in result.stderr


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("def loss(", "def lossy(", ("lacks `loss`: def loss(model, batch)", "it has `lossy`")),
        ("def model(", "def network(", ("lacks `model`",)),
        ("def batches(generator):", "def batches(:", ("line 23", "batches(:")),
        ("steps = 200", "steps = undefined", ("NameError", "line 10: steps = undefined")),
        (
            "return F.cross_entropy(model(inputs), labels)",
            "return float(model(inputs).sum())",
            ("`loss` must return a tensor", "(float)"),
        ),
        (
            "cross_entropy(model(inputs), labels)",
            "cross_entropy(model(inputs), labels, reduction='none')",
            ("shape (50,)", ".mean()"),
        ),
        (
            "cross_entropy(model(inputs), labels)",
            "cross_entropy(model(inputs[:, :3]), labels)",
            (
                "RuntimeError",
                "return F.cross_entropy(model(inputs[:, :3])",
                "in the layer `0`, Linear(in_features=20",
                "a batch: tuple of 2 (float32 tensor of shape (50, 20), int64 tensor of shape (50,))",
            ),
        ),
        ("def loss(model, batch):", "def loss(batch, model):", ("called with the model, Sequential, and a batch",)),
        ("    return nn.Sequential(", "    nn.Sequential(", ("it returned None", "is a `return` missing?")),
        (
            "    for rows in torch.randperm(1000, generator=generator).split(50):\n        yield x[rows], y[rows]",
            "    return x, y",
            ("`batches` is a tuple of 2 tensors", "yield the tuple, or put it into a list"),
        ),
        (
            "cross_entropy(model(inputs), labels)",
            "cross_entropy(model(inputs) / 0, labels)",
            ("`loss` is nan for the first batch", "before any step"),
        ),
        (
            "yield x[rows], y[rows]",
            "yield x[rows] * float('nan'), y[rows]",
            ("`batches` gave a batch that holds a NaN", "in its tensor 1 of shape (50, 20)", "my_task.py, line"),
        ),
        ("yield x[rows], y[rows]", "yield x[rows[:0]], y[rows[:0]]", ("gave a batch that is empty", "shape (0, 20)")),
        (
            "cross_entropy(model(inputs), labels)",
            "cross_entropy(model(inputs).detach(), labels)",
            ("does not depend on the weights",),
        ),
        ("def loss(model, batch):", "def loss(model):\n    batch = None", ("`loss(model, batch)`", "it takes (model)")),
        ("    return nn.Sequential(", "    return list, nn.Sequential(", ("`model` must return a torch.nn.Module",)),
        ("nn.Linear(64, 2))", "nn.Linear(64, 2)).requires_grad_(False)", ("no parameters to train",)),
        ("yield x[rows], y[rows]", "pass", ("`batches` must return batches: use yield",)),
        ("split(50)", "split(50)[:0]", ("`batches` gave no batch", "Are the data empty")),
        (
            "return 100 * (model(x[1000:]).argmax(1) == y[1000:]).float().mean()",
            "return 'good'",
            ("`evaluate` must return one number", "'good'"),
        ),
        ("float().mean()", "float().mean() / 0 * 0", ("`evaluate` is nan for the untrained model",)),
        ('metric = "test accuracy %"', 'better = "large"', ('"higher" or "lower"',)),
        ("steps = 200", "import no_such_module", ("ModuleNotFoundError", "no_such_module")),
    ],
)
def test_a_file_that_does_not_fit_is_told_by_function_and_line(
    file: Path, old: str, new: str, words: tuple[str, ...]
) -> None:
    assert_told(run(edited(file, old, new)), *words)
    assert not (file.parent / "out" / "compare-my_task.csv").exists()


def test_the_line_of_a_mistake_is_that_of_the_file(file: Path) -> None:
    edited(file, "cross_entropy(model(inputs), labels)", "cross_entropy(model(inputs), labels + 7)")
    assert_told(run(file), f"(my_task.py, line {line_of(file, 'return F.cross_entropy')}: return")


def test_a_mistake_outside_of_functions_has_its_line_in_a_file_of_the_working_directory(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    edited(file, "steps = 200", "steps = undefined")
    with pytest.raises(TaskError, match="line 10: steps = undefined"):
        read_task(Path(file.name))


def test_a_function_whose_name_is_almost_evaluate_is_named(file: Path) -> None:
    assert near_misses(file) == []
    edited(file, "def evaluate(", "def evalute(")
    assert near_misses(file) == ["my_task.py has no `evaluate`; is `evalute` meant for it?"]


def test_an_error_in_the_middle_of_a_run_is_told_with_its_line(file: Path) -> None:
    edited(
        file,
        "    inputs, labels = batch\n",
        "    inputs, labels = batch\n    count.append(1)\n    assert len(count) < 9\n",
    )
    edited(file, "steps = 200", "steps = 200\ncount = []")
    result = run(file, "--methods", "adam@0.01")
    assert_told_in_the_end(result, "AssertionError", "assert len(count) < 9")


def test_a_nan_in_a_later_batch_is_told_and_not_taken_for_divergence(file: Path) -> None:
    edited(
        file,
        "    for rows in torch.randperm(1000, generator=generator).split(50):\n        yield x[rows], y[rows]",
        "    for n, rows in enumerate(torch.randperm(1000, generator=generator).split(50)):\n"
        "        yield x[rows] / (0 if n == 3 else 1) * 0, y[rows]",
    )
    result = run(file, "--methods", "adam@0.01")
    assert result.exit_code == 2
    assert "`batches` gave a batch that holds a NaN" in result.stderr.splitlines()[-1]


def assert_told_in_the_end(result: Result, *words: str) -> None:
    assert result.exit_code == 2
    last = result.stderr.splitlines()[-1]
    assert last.startswith("ddpnopt: `loss` failed with")
    for word in words:
        assert word in last


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--methods", "lion"), "unknown method 'lion'"),
        (("--methods", "ddpnop"), "did you mean 'ddpnopt'?"),
        (("--epochs", "3"), "--epochs belongs to a data set"),
        (("--methods", "adam@fast"), "learning rate"),
    ],
)
def test_options_that_do_not_fit_a_file_are_refused(file: Path, options: tuple[str, ...], word: str) -> None:
    assert_told(run(file, *options), word)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    assert_told(run(tmp_path / "nothing.py"), "there is no Python file")


def test_a_rate_that_diverges_is_marked_and_the_others_go_on(file: Path) -> None:
    result = run(file, "--methods", "sgd-m@1e30,adam@0.01")
    assert result.exit_code == 0, result.output
    assert "1/1 diverged" in result.stdout


def test_a_run_that_diverged_is_trained_again(file: Path) -> None:
    options = ("--methods", "sgd-m@1e30,adam@0.01")
    run(file, *options)
    again = run(file, *options)
    assert "1 run of an earlier call" in again.stderr
    assert "my_task, sgd-m, lr 1e+30, seed 0" in again.stderr


def test_a_new_version_of_the_optimizer_trains_again_and_other_methods_do_not(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--methods", "ddpnopt,adam@0.01")
    monkeypatch.setattr(store, "code_state", lambda: "an older one")
    monkeypatch.setattr(own, "code_state", lambda: "an older one")
    run(file, *options)
    monkeypatch.undo()
    again = run(file, *options)
    assert "1 run of an earlier call" in again.stderr
    assert "my_task, ddpnopt" in again.stderr
    assert "2 runs of an earlier call" in run(file, *options).stderr


def data() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.linspace(-1, 1, 64)[:, None]
    return x, x.square()


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))


def squared_error(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, y = batch
    return F.mse_loss(model(x), y)


def test_the_function_takes_a_data_loader_and_judges_by_the_loss_without_a_metric(tmp_path: Path) -> None:
    loader = DataLoader(TensorDataset(*data()), batch_size=16, shuffle=True)
    result = compare(network, loader, squared_error, steps=10, methods=["ddpnopt", "adam@0.01"], name="parabola")
    text = str(result)
    assert "parabola, 10 steps" in text
    assert "DDPNOpt" in text
    assert not result.task.higher_is_better
    assert all(row.metric.mean == row.train_loss.mean for row in result.summaries)
    assert [path.name for path in result.save(tmp_path / "made")] == [
        "compare-parabola.png", "compare-parabola.svg", "compare-parabola.csv",
    ]  # fmt: skip


def test_every_method_starts_from_the_same_weights_and_sees_the_same_batches() -> None:
    loader = DataLoader(TensorDataset(*data()), batch_size=16, shuffle=True)
    result = compare(network, loader, squared_error, steps=60, methods=["ddpnopt", "adam@0.01", "sgd@0.1"])
    first = {run.outcome.curve.losses[0] for row in result.summaries for run in row.runs}
    assert len(first) == 1, "the first of fifty samples of sixty steps is one step"


def test_a_model_that_is_given_is_copied_and_not_changed() -> None:
    model, batch = network(), [data()]
    before = [p.clone() for p in model.parameters()]
    compare(model, batch, squared_error, steps=3, methods=["ddpnopt"])
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_ddpnopt_is_told_the_loss_so_that_a_squared_error_has_its_scale(recwarn: pytest.WarningsRecorder) -> None:
    compare(network, [data()], squared_error, steps=3, methods=["ddpnopt"])
    assert not [warning for warning in recwarn if "UncertainLoss" in warning.category.__name__]


def test_batches_that_can_be_gone_through_only_once_are_refused() -> None:
    with pytest.raises(TaskError, match="only once"):
        OwnTask("once", network, iter([data()]), squared_error, 5)


def test_a_folder_keeps_the_runs_of_the_function(tmp_path: Path) -> None:
    seen: list[bool] = []
    for _ in range(2):
        compare(
            network, [data()], squared_error, steps=3, methods=["adam@0.01"], store=tmp_path / "kept",
            on_step=lambda *about: seen.append(about[-1] is None),
        )  # fmt: skip
    assert seen == [False, False, False, True]


def test_the_example_is_what_the_documentation_shows() -> None:
    page = (Path(__file__).parents[3] / "docs" / "howto" / "compare.md").read_text(encoding="utf-8")
    functions = re.findall(r"^def (\w+)", EXAMPLE.read_text(encoding="utf-8"), re.M)
    assert functions == ["model", "batches", "loss", "evaluate"]
    for name in functions:
        assert f"`{name}" in page
