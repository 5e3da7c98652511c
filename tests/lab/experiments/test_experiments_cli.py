"""The commands, as a user calls them."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pandas as pd
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner, Result

from ddpnopt.lab.cli import app


def run(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "160", "TERM": "dumb"}).invoke(app, list(arguments))


def assert_one_line_error(result: Result, *words: str) -> None:
    assert result.exit_code == 2
    assert result.stderr.startswith("ddpnopt: ")
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.output
    for word in words:
        assert word in result.stderr


def test_compare_prints_a_table_and_saves_picture_and_numbers(tmp_path: Path) -> None:
    out = tmp_path / "made" / "here"
    result = run("compare", "wine", "--methods", "sgd,adam@0.01", "--seeds", "2", "--epochs", "2", "--out", str(out))
    assert result.exit_code == 0, result.output
    for word in ("SGD", "Adam", "0.01", "★", "±"):
        assert word in result.stdout
    assert Image.open(out / "compare-wine.png").size[0] > 1000
    assert ElementTree.parse(out / "compare-wine.svg").getroot().tag.endswith("svg")
    numbers = pd.read_csv(out / "compare-wine.csv")
    assert list(zip(numbers.method, numbers.seed, strict=True)) == [("sgd", 0), ("sgd", 1), ("adam", 0), ("adam", 1)]


def test_compare_runs_ddpnopt_beside_a_baseline(tmp_path: Path) -> None:
    result = run(
        *("compare", "wine", "--methods", "ddpnopt@0.5,sgd-m", "--seeds", "1", "--epochs", "1"),
        *("--batch-size", "16", "--out", str(tmp_path)),
    )
    assert result.exit_code == 0, result.output
    assert "DDPNOpt" in result.stdout


def test_compare_reads_images_from_the_folder_and_tells_their_footnote(folder: Path, tmp_path: Path) -> None:
    result = run(
        *("compare", "svhn", "--methods", "sgd", "--seeds", "1", "--epochs", "1", "--n-train", "20"),
        *("--data-dir", str(folder), "--out", str(tmp_path)),
    )
    assert result.exit_code == 0, result.output
    assert "resized from 32x32 to 28x28" in result.stdout


def test_compare_marks_what_diverged(tmp_path: Path) -> None:
    result = run(
        *("compare", "gaussian-3", "--methods", "sgd@1e30,sgd", "--seeds", "1", "--epochs", "1"),
        *("--out", str(tmp_path)),
    )
    assert result.exit_code == 0, result.output
    assert "1/1 diverged" in result.stdout


def test_compare_can_tune_first(tmp_path: Path) -> None:
    result = run(
        *("compare", "wine", "--methods", "sgd", "--tune", "--seeds", "1", "--epochs", "1", "--out", str(tmp_path))
    )
    assert result.exit_code == 0, result.output


def test_train_saves_weights_that_load_safely(tmp_path: Path) -> None:
    target = tmp_path / "model.pt"
    result = run("train", "wine", "--method", "adam", "--epochs", "2", "--lr", "0.01", "--save", str(target))
    assert result.exit_code == 0, result.output
    assert "test accuracy" in result.stdout
    saved = torch.load(target, weights_only=True)
    assert saved["config"]["method"] == "adam"
    assert saved["config"]["lr"] == 0.01
    assert saved["state_dict"]["1.weight"].shape == (10, 13)


def test_train_ends_with_code_1_when_it_diverged() -> None:
    result = run("train", "gaussian-3", "--method", "sgd", "--epochs", "1", "--lr", "1e30")
    assert result.exit_code == 1
    assert "diverged" in result.stdout


def test_data_lists_what_is_there_and_what_is_not(folder: Path) -> None:
    result = run("data", "--data-dir", str(folder))
    assert result.exit_code == 0, result.output
    for word in ("wine", "scikit-learn", "1,438", str(folder / "mnist"), "zalando-datasets/fashion_mnist"):
        assert word in result.stdout.replace("\n", "")


def test_data_decodes_a_set_that_is_named(folder: Path, cache: Path) -> None:
    result = run("data", "svhn", "--data-dir", str(folder))
    assert result.exit_code == 0, result.output
    assert "3x28x28" in result.stdout
    assert len(list((cache / "decoded").glob("svhn-*.pt"))) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("compare", "imagenet"), ("unknown data set 'imagenet'", "digits")),
        (("compare", "wine", "--methods", "lion"), ("unknown method 'lion'", "adam")),
        (("compare", "wine", "--methods", "adam@fast"), ("learning rate",)),
        (("compare", "wine", "--methods", ","), ("no method",)),
        (("compare", "wine", "--network", "cnn", "--methods", "sgd"), ("needs images",)),
        (("compare", "wine", "--n-train", "999", "--methods", "sgd"), ("142 training samples",)),
        (("train", "wine", "--method", "lion"), ("unknown method",)),
        (("train", "wine", "--method", "sgd", "--lr", "-1"), ("must be positive",)),
        (("train", "wine", "--network", "rnn"), ("unknown network",)),
        (("train", "mnist", "--data-dir", "/no/such/folder"), ("/no/such/folder",)),
        (("data", "--data-dir", "/no/such/folder"), ("/no/such/folder",)),
        (("data", "imagenet"), ("unknown data set",)),
    ],
)
def test_bad_input_is_one_line_and_code_2(arguments: tuple[str, ...], words: tuple[str, ...], tmp_path: Path) -> None:
    extra = ("--out", str(tmp_path)) if arguments[0] == "compare" else ()
    assert_one_line_error(run(*arguments, *extra), *words)


def test_a_place_that_cannot_be_written_is_told_before_training(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert_one_line_error(run("compare", "wine", "--out", str(blocked / "under")), "cannot write into")
    assert_one_line_error(run("train", "wine", "--save", str(blocked / "model.pt")), "cannot write into")


def test_a_truncated_file_is_one_line_and_code_2(folder: Path) -> None:
    path = folder / "mnist" / "train.parquet"
    path.write_bytes(path.read_bytes()[:300])
    assert_one_line_error(run("train", "mnist", "--data-dir", str(folder)), str(path))


def test_data_lists_the_other_sets_when_one_is_damaged(folder: Path) -> None:
    (folder / "mnist" / "train.parquet").write_bytes(b"nothing")
    result = run("data", "--data-dir", str(folder))
    assert result.exit_code == 0, result.output
    assert "not a whole Parquet file" in result.stdout
    assert str(folder / "svhn") in result.stdout.replace("\n", "")


@pytest.mark.parametrize("arguments", [("compare", "wine", "--seeds", "0"), ("train", "wine", "--epochs", "many")])
def test_numbers_out_of_range_end_with_code_2(arguments: tuple[str, ...]) -> None:
    assert run(*arguments).exit_code == 2
