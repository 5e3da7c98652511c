"""`ddpnopt bench speed`: structure, not seconds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

from ddpnopt.ddp.balance import LONGEST as LOOKS
from ddpnopt.lab.cli import app
from ddpnopt.lab.methods.method import Method, Timing
from ddpnopt.lab.methods.registry import METHODS, PEER_METHODS, TIMED_METHODS
from ddpnopt.lab.timing.growth import SIZES, exponent, exponents
from ddpnopt.lab.timing.memory import peak_bytes
from ddpnopt.lab.timing.networks import NETWORKS, Network, dense, scaled
from ddpnopt.lab.timing.peers import REFRESH
from ddpnopt.lab.timing.profiles import profile
from ddpnopt.lab.timing.selection import affordable, timed_methods
from ddpnopt.lab.timing.speed import Cost, block_steps, measure, relative
from ddpnopt.lab.timing.speed_report import base_rows
from ddpnopt.lab.timing.steppers import DoesNotApplyError, Stepper, ready, widest


def run(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "160", "TERM": "dumb"}).invoke(app, ["bench", "speed", *arguments])


def test_a_method_beside_itself() -> None:
    sgd, again = measure(scaled(8, 2), 4, timed_methods(["sgd", "sgd-again"]), 3)
    assert sgd.ratios == [1.0, 1.0, 1.0]
    assert len(again.ratios) == 3
    assert all(ratio > 0 for ratio in again.ratios)
    assert again.memory_ratio == 1.0
    low, high = again.quartiles
    assert low <= again.ratio <= high


def test_peak_memory_is_counted_byte_by_byte() -> None:
    width, B = 256, 128
    network = Network("one", "one", lambda: dense([width, width, 10]), lambda B: torch.randn(B, width), B)
    plain = ready(METHODS["sgd"], network, B)
    adam = ready(METHODS["adam"], network, B)
    weights = 4 * sum(p.numel() for p in plain.model.parameters())
    least = 2 * weights + 4 * B * width  # weights, gradients and the hidden layer
    assert least < peak_bytes(plain) < least + 4 * 4 * B * width
    assert peak_bytes(plain) == peak_bytes(plain)
    assert peak_bytes(adam) - peak_bytes(plain) >= 2 * weights


@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_makes_a_step_with_ddpnopt(name: str) -> None:
    network = NETWORKS[name]
    stepper = ready(METHODS["batch"], network, 2)
    before = [p.detach().clone() for p in stepper.model.parameters()]
    stepper.step()
    assert any(not torch.equal(a, b) for a, b in zip(before, stepper.model.parameters(), strict=True))


def test_resnet_18_has_its_size() -> None:
    assert sum(p.numel() for p in NETWORKS["resnet18"].build().parameters()) == 11_173_962


def test_a_form_that_does_not_apply_has_no_numbers() -> None:
    sgd, full = measure(NETWORKS["transformer"], 2, timed_methods(["full"]), 1)
    assert sgd.applies
    assert not full.applies
    assert full.reason


def test_exponents_of_made_up_costs() -> None:
    assert exponent([1, 2, 4, 8], [5, 20, 80, 320]) == pytest.approx(2.0)
    by_size = [
        [Cost(scaled(8, 2), B, METHODS["sgd"], (float(B),), (1.0,), 100 * B**2, 100)]
        for B in (16, 32, 64, 128, 256, 512)
    ]
    [found] = exponents("batch", by_size)
    assert (found.time, found.memory) == pytest.approx((1.0, 2.0))


def test_the_profile_names_phases_and_functions_and_adds_up() -> None:
    stepper = ready(METHODS["batch"], scaled(8, 2), 4)
    shares = profile(stepper, 3)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert {"forward", "backward", "step"} <= {phase for phase, _ in shares}
    assert any(function.startswith("ddp.value.batch") for _, function in shares)


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
    assert (tmp_path / "speed.svg").stat().st_size > 10_000


def test_growth_and_profile_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpnopt.lab.timing.growth.SIZES", {"batch": (2, 4, 8)})
    monkeypatch.setattr("ddpnopt.lab.timing.growth.WIDTH", 8)
    result = run("--growth", "batch", "--methods", "outer", "--repeats", "1", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "exponent" in result.stdout
    assert (tmp_path / "growth-batch.svg").exists()
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


TIMED = [METHODS[name] for name in TIMED_METHODS]


@pytest.mark.parametrize("method", [each for each in TIMED if each.timing.period > 1], ids=lambda method: method.name)
def test_methods_that_refresh_something_are_timed_over_whole_periods(method: Method) -> None:
    if method.missing:
        pytest.skip(method.missing)
    stepper = ready(method, scaled(4, 1), 4)
    assert method.timing.period == (LOOKS if method.name == "ddpnopt" else REFRESH)
    assert block_steps(stepper) % method.timing.period == 0


@pytest.mark.parametrize("method", [METHODS[name] for name in PEER_METHODS], ids=lambda method: method.name)
def test_every_installed_peer_trains_the_small_networks(method: Method) -> None:
    if method.missing:
        pytest.skip(method.missing)
    for name in ("fcn", "cnn"):
        stepper = ready(method, NETWORKS[name], 2)
        before = [p.detach().clone() for p in stepper.model.parameters()]
        for _ in range(method.timing.period):  # Shampoo stands still until its first refresh
            stepper.step()
        after = list(stepper.model.parameters())
        assert all(bool(p.isfinite().all()) for p in after)
        assert all(not torch.equal(p, q) for p, q in zip(before, after, strict=True))


def test_a_missing_package_is_a_row_with_what_to_install() -> None:
    absent = replace(METHODS["sam"], name="absent", package="no_such_package", install="no-such-package")
    sgd, row = measure(scaled(4, 1), 2, [METHODS["sgd"], absent], 1)
    assert sgd.applies
    assert row.reason == "not installed: pip install no-such-package"


def test_a_peer_that_fails_in_the_middle_is_a_row_with_the_reason() -> None:
    class Fails(Stepper):
        count = 0

        def update(self) -> None:
            self.count += 1
            if self.count > 10:
                raise ValueError("a factor is singular\nmore lines")

    failing = Method("fails", "fails", METHODS["sgd"].factory, package="torch", timing=Timing(stepper=Fails))
    sgd, row = measure(scaled(4, 1), 2, [METHODS["sgd"], failing], 12)  # at least one step in each round
    assert len(sgd.seconds) == 12
    assert not row.applies
    assert row.reason == "ValueError: a factor is singular"


def test_an_error_of_our_own_is_not_hidden() -> None:
    def broken(model: nn.Module, **_: object) -> torch.optim.Optimizer:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        ready(Method("broken", "broken", broken), scaled(4, 1), 2)


def test_full_is_refused_before_it_takes_the_memory_of_the_machine() -> None:
    assert widest(NETWORKS["cnn"]) == 32 * 32 * 32
    with pytest.raises(DoesNotApplyError, match=r"34\.4 GB"):
        ready(METHODS["full"], NETWORKS["cnn"], 8)


def test_feedback_is_compared_round_by_round_with_the_same_without() -> None:
    network = scaled(4, 1)
    base = Cost(network, 2, METHODS["kfac"], (2.0, 6.0, 4.0), (1.0, 2.0, 1.0), 1, 1)
    with_feedback = Cost(network, 2, METHODS["outer-kfac"], (3.0, 3.0, 12.0), (1.0, 1.0, 2.0), 1, 1)
    assert relative(with_feedback, base) == [1.5, 1.0, 1.5]
    assert base_rows([base, with_feedback]) == [["outer, KFAC", "KFAC, no feedback", "1.50", "1.25 – 1.50"]]
    assert base_rows([with_feedback]) == []


def test_every_base_is_a_form_without_a_base() -> None:
    for method in TIMED:
        if method.timing.without_feedback is not None:
            base = METHODS[method.timing.without_feedback]
            assert base.timing.without_feedback is None
            assert method.timing.period % base.timing.period == 0


def test_growth_beyond_sgd_and_up_to_moderate_batches() -> None:
    sizes = SIZES["batch"]
    assert (sizes[0], sizes[-1]) == (8, 2048)
    # Twice SGD up to 512, then growing with the batch as well: the ratio's exponent is 0 there, and larger over all.
    by_size = [
        [Cost(scaled(8, 2), B, METHODS["batch"], (2.0 * B * max(1, B / 512),), (float(B),), B, B)] for B in sizes
    ]
    [found] = exponents("batch", by_size)
    assert found.moderate == pytest.approx(0.0)
    assert found.beyond > 0.3


def test_large_networks_go_without_kronecker_methods_by_default() -> None:
    chosen = timed_methods(["outer", "outer-kfac", "soap"])
    assert [method.name for method in affordable(chosen, NETWORKS["resnet18"])] == ["sgd", "outer"]
    assert affordable(chosen, NETWORKS["cnn"]) == chosen


def test_one_command_measures_ratios_growth_and_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpnopt.lab.timing.growth.SIZES", dict.fromkeys(("batch", "width", "depth"), (2, 4)))
    monkeypatch.setattr("ddpnopt.lab.timing.growth.WIDTH", 4)
    monkeypatch.setattr("ddpnopt.lab.timing.growth.DEPTH", 1)
    result = run(
        *("--all", "--networks", "fcn", "--methods", "no-feedback,outer,batch", "--repeats", "1"),
        *("--out", str(tmp_path)),
    )
    assert result.exit_code == 0, result.output
    for words in ("with feedback / without", "growth with the batch", "growth with the depth", "where the time goes"):
        assert words in result.stdout
    for stem in ("speed", "growth-batch", "growth-width", "growth-depth"):
        assert (tmp_path / f"{stem}.md").exists()
        assert (tmp_path / f"{stem}.svg").exists()
    assert "outer on FCN of DIGITS" in (tmp_path / "profile.md").read_text()


def test_the_first_steps_and_repeated_ones_are_counted() -> None:
    network = scaled(8, 2)
    found = {cost.method.name: cost for cost in measure(network, 4, timed_methods(["ddpnopt"]), 1, start=True)}
    assert found["ddpnopt"].start > 0
    assert found["sgd"].start > 0
    assert 0 <= found["ddpnopt"].repeated <= 1
    assert found["sgd"].repeated == 0


def test_networks_with_channels_last_have_weights_and_inputs_of_that_layout() -> None:
    network = NETWORKS["cnn-last"]
    weight = next(network.build().parameters())
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert network.inputs(2).is_contiguous(memory_format=torch.channels_last)
