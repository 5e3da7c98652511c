"""`ddpnopt bench speed`: structure, not seconds."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner, Result

from ddpnopt.bench.forms import FORMS, forms
from ddpnopt.bench.growth import exponents, slope
from ddpnopt.bench.memory import peak_bytes
from ddpnopt.bench.networks import NETWORKS, Network, dense, scaled
from ddpnopt.bench.profiles import profile
from ddpnopt.bench.speed import Cost, measure
from ddpnopt.bench.steppers import ready
from ddpnopt.cli import app


def run(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "160", "TERM": "dumb"}).invoke(app, ["bench", "speed", *arguments])


def test_a_method_beside_itself() -> None:
    sgd, again = measure(scaled(8, 2), 4, forms(["sgd", "sgd-again"]), 3)
    assert sgd.ratios == [1.0, 1.0, 1.0]
    assert len(again.ratios) == 3
    assert all(ratio > 0 for ratio in again.ratios)
    assert again.memory_ratio == 1.0
    low, high = again.quartiles
    assert low <= again.ratio <= high


def test_peak_memory_is_counted_byte_by_byte() -> None:
    width, B = 256, 128
    network = Network("one", "one", lambda: dense([width, width, 10]), lambda B: torch.randn(B, width), B)
    plain = ready(FORMS["sgd"], network, B)
    adam = ready(FORMS["adam"], network, B)
    weights = 4 * sum(p.numel() for p in plain.model.parameters())
    least = 2 * weights + 4 * B * width  # weights, gradients and the hidden layer
    assert least < peak_bytes(plain) < least + 4 * 4 * B * width
    assert peak_bytes(plain) == peak_bytes(plain)
    assert peak_bytes(adam) - peak_bytes(plain) >= 2 * weights


@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_makes_a_step_with_ddpnopt(name: str) -> None:
    network = NETWORKS[name]
    stepper = ready(FORMS["batch"], network, 2)
    before = [p.detach().clone() for p in stepper.model.parameters()]
    stepper.step()
    assert any(not torch.equal(a, b) for a, b in zip(before, stepper.model.parameters(), strict=True))


def test_resnet_18_has_its_size() -> None:
    assert sum(p.numel() for p in NETWORKS["resnet18"].build().parameters()) == 11_173_962


def test_a_form_that_does_not_apply_has_no_numbers() -> None:
    sgd, full = measure(NETWORKS["transformer"], 2, forms(["full"]), 1)
    assert sgd.applies
    assert not full.applies
    assert full.reason


def test_exponents_of_made_up_costs() -> None:
    assert slope([1, 2, 4, 8], [5, 20, 80, 320]) == pytest.approx(2.0)
    by_size = [
        [Cost(scaled(8, 2), B, FORMS["sgd"], (float(B),), (1.0,), 100 * B**2, 100)] for B in (16, 32, 64, 128, 256, 512)
    ]
    [found] = exponents("batch", by_size)
    assert (found.time, found.memory) == pytest.approx((1.0, 2.0))


def test_the_profile_names_phases_and_functions_and_adds_up() -> None:
    stepper = ready(FORMS["batch"], scaled(8, 2), 4)
    shares = profile(stepper, 3)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert {"forward", "backward", "step"} <= {phase for phase, _ in shares}
    assert any(function.startswith("value.batch") for _, function in shares)


def test_speed_writes_a_table_and_a_picture(tmp_path: Path) -> None:
    result = run(
        *("--networks", "fcn", "--methods", "adam,batch", "--batch-sizes", "4,8", "--repeats", "2"),
        *("--out", str(tmp_path)),
    )
    assert result.exit_code == 0, result.output
    numbers = pd.read_csv(tmp_path / "speed.csv")
    assert list(numbers.method) == ["sgd", "adam", "batch"] * 2
    assert list(numbers.batch_size) == [4] * 3 + [8] * 3
    page = (tmp_path / "speed.md").read_text()
    for word in ("machine", "torch threads: 1", "versions", "command"):
        assert word in page
    assert Image.open(tmp_path / "speed.png").size[0] > 800
    assert (tmp_path / "speed.svg").exists()


def test_growth_and_profile_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpnopt.bench.growth.SIZES", {"batch": (2, 4, 8)})
    monkeypatch.setattr("ddpnopt.bench.growth.WIDTH", 8)
    result = run("--growth", "batch", "--methods", "outer", "--repeats", "1", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "exponent" in result.stdout
    assert (tmp_path / "growth-batch.png").exists()
    result = run("--profile", "--networks", "fcn", "--methods", "batch", "--repeats", "2", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "where the time goes" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--networks", "vgg"), ("unknown network 'vgg'", "resnet18")),
        (("--methods", "lion"), ("unknown method 'lion'", "batch-open")),
        (("--growth", "heads"), ("unknown growth 'heads'", "width")),
        (("--batch-sizes", "0"), ("--batch-sizes must be positive",)),
    ],
)
def test_bad_input_is_one_line_and_code_2(arguments: tuple[str, ...], words: tuple[str, ...], tmp_path: Path) -> None:
    result = run(*arguments, "--out", str(tmp_path))
    assert result.exit_code == 2
    assert result.stderr.startswith("ddpnopt: ")
    for word in words:
        assert word in result.stderr
