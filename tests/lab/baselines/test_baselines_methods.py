"""Baselines by their short names, and the command that trains them all."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import torch
from typer.testing import CliRunner, Result

from ddpnopt.lab.baselines import EKFAC, EMSA, KFAC, SGDVGR, VanillaDDP
from ddpnopt.lab.baselines.study import EPOCHS, TABLE_3, configuration
from ddpnopt.lab.cli import app
from ddpnopt.lab.data import Dataset
from ddpnopt.lab.errors import ExperimentError
from ddpnopt.lab.methods import METHODS, make_optimizer
from ddpnopt.lab.networks import build
from ddpnopt.lab.runs.training import RunConfig, train

KINDS = {"emsa": EMSA, "vanilla-ddp": VanillaDDP, "sgd-vgr": SGDVGR, "kfac": KFAC, "ekfac": EKFAC}


@pytest.fixture(autouse=True)
def _float32() -> None:
    torch.set_default_dtype(torch.float32)


def pictures() -> Dataset:
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(12, 1, 8, 8, generator=g), torch.arange(12) % 3
    return Dataset("wine", x, y, x, y, 3)


@pytest.mark.parametrize(("name", "kind"), KINDS.items())
def test_a_baseline_is_made_by_its_name(name: str, kind: type) -> None:
    optimizer = make_optimizer(name, build("fcn", pictures(), 0))
    assert isinstance(optimizer, kind)
    assert optimizer.param_groups[0]["lr"] == METHODS[name].lr


def test_options_reach_the_baseline() -> None:
    model = build("fcn", pictures(), 0)
    assert make_optimizer("emsa", model).param_groups[0]["rho"] == 1.0
    assert make_optimizer("emsa", model, rho=0.5, reg=0.0).param_groups[0]["rho"] == 0.5
    assert make_optimizer("emsa", build("cnn", pictures(), 0)).param_groups[0]["rho"] == 0.03


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("network", ["fcn", "sigmoid-fcn"])
def test_every_baseline_trains_the_fully_connected_networks(name: str, network: str) -> None:
    config = RunConfig(name, "pictures", network, epochs=1, batch_size=6)
    result = train(config, pictures())
    assert result.steps == 2
    assert not result.diverged


@pytest.mark.parametrize("name", ["emsa", "kfac", "ekfac"])
def test_those_which_can_train_the_convolutional_network(name: str) -> None:
    result = train(RunConfig(name, "pictures", "cnn", epochs=1, batch_size=6), pictures())
    assert not result.diverged


def test_emsa_trains_the_papers_cnn_in_a_few_steps() -> None:
    y = torch.arange(30) % 3
    x = 0.3 * torch.randn(30, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    for image, label in zip(x, y.tolist(), strict=True):
        image[:, :, 2 * label : 2 * label + 3] += 1.0  # a bar whose place tells the class
    bars = Dataset("bars", x, y, x, y, 3)
    result = train(RunConfig("emsa", "bars", "cnn", options={"rho": 0.3}, epochs=5, batch_size=30), bars)
    assert result.train_loss < 0.5 * result.losses[0]


@pytest.mark.parametrize("name", ["vanilla-ddp", "sgd-vgr"])
def test_those_which_cannot_say_so(name: str) -> None:
    with pytest.raises(ExperimentError, match=f"{name}: .*fully connected networks.*Conv2d"):
        train(RunConfig(name, "pictures", "cnn"), pictures())


def test_emsa_says_that_a_residual_network_is_no_chain() -> None:
    with pytest.raises(ExperimentError, match=r"emsa: .*chain of layers"):
        make_optimizer("emsa", build("resnet", pictures(), 0))


def test_slow_methods_get_fewer_epochs() -> None:
    assert all(configuration(name, dataset).epochs == epochs for (name, dataset), epochs in EPOCHS.items())
    assert configuration("sgd", "digits").epochs > EPOCHS["emsa", "digits"]
    assert configuration("sgd", "digits", 2).epochs == 2


def run(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "160", "TERM": "dumb"}).invoke(app, ["baselines", *arguments])


def test_the_command_prints_the_papers_numbers_beside_ours_and_saves_both(tmp_path: Path) -> None:
    result = run(
        *("--datasets", "wine", "--methods", "adam,emsa,kfac", "--seeds", "2", "--max-epochs", "1"),
        *("--out", str(tmp_path / "new")),
    )
    assert result.exit_code == 0, result.output
    for word in ("Adam", "E-MSA", "KFAC", f"{TABLE_3['wine']['adam']:.2f}", f"{TABLE_3['wine']['emsa']:.2f}", "±"):
        assert word in result.stdout
    numbers = pd.read_csv(tmp_path / "new" / "baselines.csv")
    assert list(numbers.method) == ["adam", "adam", "emsa", "kfac", "kfac"]  # one seed for the slow
    page = (tmp_path / "new" / "baselines.md").read_text()
    assert page.count("\n| wine |") == 3
    assert "98.13" in page


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(("--methods", "lion"), "lion"), (("--datasets", "moon"), "moon"), (("--methods", ","), "least")],
)
def test_the_command_tells_bad_input_in_one_line(arguments: tuple[str, ...], word: str, tmp_path: Path) -> None:
    result = run(*arguments, "--out", str(tmp_path))
    assert result.exit_code == 2
    assert word in result.stderr
    assert result.stderr.count("\n") == 1
