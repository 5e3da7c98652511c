"""Image sets out of Parquet files, through the decoded cache."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from parquet_folder import encode, pixels, write_parquet, write_split

from ddpnopt.lab.data import cache as cache_module
from ddpnopt.lab.data import load, parquet, status
from ddpnopt.lab.errors import DataError


def fake_hub(monkeypatch: pytest.MonkeyPatch, download: Callable[..., str]) -> None:
    """huggingface_hub with another download function, whether or not the library is installed."""
    module = ModuleType("huggingface_hub")
    module.hf_hub_download = download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("this must not be called again")


def test_pixels_survive_up_to_the_standardisation(folder: Path) -> None:
    data = load("mnist", data_dir=folder)
    images, labels = pixels(40, 28, 1)
    expected = torch.from_numpy(images).permute(0, 3, 1, 2).double()
    expected = (expected - expected.mean()) / expected.std(correction=0)
    torch.testing.assert_close(data.x_train, expected.float())
    assert data.y_train.tolist() == labels.tolist()
    assert data.note == ""


@pytest.mark.parametrize("name", ["cifar10", "svhn"])
def test_every_channel_is_standardised_by_the_training_split(folder: Path, name: str) -> None:
    data = load(name, data_dir=folder)
    torch.testing.assert_close(data.x_train.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(data.x_train.std((0, 2, 3), correction=0), torch.ones(3), atol=1e-5, rtol=0)


def test_the_folder_may_come_from_the_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPNOPT_DATA", str(folder))
    assert load("mnist").x_train.shape == (40, 1, 28, 28)


def test_images_that_differ_from_the_original_carry_a_footnote(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_split(tmp_path / "svhn" / f"{split}.parquet", 10, 28, 3)
        write_split(tmp_path / "cifar10" / f"{split}.parquet", 10, 32, 3, encoding="JPEG")
    assert "resized from 32x32 to 28x28" in load("svhn", data_dir=tmp_path).note
    assert "JPEG" in load("cifar10", data_dir=tmp_path).note


def test_a_set_is_decoded_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load("mnist", data_dir=folder)
    monkeypatch.setattr("ddpnopt.lab.data.images.decode", never)
    second = load("mnist", data_dir=folder)
    assert torch.equal(first.x_train, second.x_train)
    assert torch.equal(first.y_test, second.y_test)


def test_more_rows_than_one_task_keep_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "ROWS_PER_TASK", 7)
    images = write_split(tmp_path / "train.parquet", 40, 8, 3)
    split = parquet.decode(tmp_path / "train.parquet", channels=3, classes=10)
    assert np.array_equal(split.images.permute(0, 2, 3, 1).numpy(), images)


def test_a_source_changed_after_decoding_is_found(folder: Path) -> None:
    load("mnist", data_dir=folder)
    write_split(folder / "mnist" / "train.parquet", seed=1)
    with pytest.raises(DataError, match=r"train\.parquet has changed since it was first decoded"):
        load("mnist", data_dir=folder)


def test_a_damaged_decoded_file_is_found(folder: Path, cache: Path) -> None:
    load("mnist", data_dir=folder)
    (decoded,) = (cache / "decoded").glob("*.pt")
    content = bytearray(decoded.read_bytes())
    content[len(content) // 2] ^= 1
    decoded.write_bytes(content)
    with pytest.raises(DataError, match="wrong SHA-256; delete it"):
        load("mnist", data_dir=folder)
    decoded.unlink()
    assert len(load("mnist", data_dir=folder).x_train) == 40


def test_a_damaged_record_is_found(folder: Path, cache: Path) -> None:
    load("mnist", data_dir=folder)
    (record,) = (cache / "decoded").glob("*.json")
    record.write_text("{", encoding="utf-8")
    with pytest.raises(DataError, match="is damaged; delete it"):
        load("mnist", data_dir=folder)


def test_the_record_holds_the_checksum_of_every_source(folder: Path, cache: Path) -> None:
    load("mnist", data_dir=folder)
    (record,) = (cache / "decoded").glob("*.json")
    sources = json.loads(record.read_text(encoding="utf-8"))["sources"]
    assert sources == {
        str(path): cache_module.sha256(path) for path in sorted((folder / "mnist").iterdir(), reverse=True)
    }
    assert list(status("mnist", folder).checksums.values()) == list(sources.values())


def test_a_truncated_file_is_named(folder: Path) -> None:
    path = folder / "mnist" / "train.parquet"
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(DataError, match=r"train\.parquet is not a whole Parquet file.*fetch it again"):
        load("mnist", data_dir=folder)


@pytest.mark.parametrize("renamed", [{"column": "picture"}, {"label": "target"}])
def test_a_missing_column_is_named_with_those_that_are_there(tmp_path: Path, renamed: dict[str, str]) -> None:
    path = write_parquet(tmp_path / "mnist" / "train.parquet", [b""], [0], **renamed)
    with pytest.raises(DataError, match=next(iter(renamed.values()))):
        parquet.decode(path, channels=1, classes=10)


def test_a_row_that_is_no_image_is_named(tmp_path: Path) -> None:
    images, labels = pixels(3, 8, 1)
    encoded: list[bytes | None] = [encode(image) for image in images]
    path = write_parquet(tmp_path / "a.parquet", [*encoded[:2], b"not an image"], labels.tolist())
    with pytest.raises(DataError, match=r"row 2 of .*a\.parquet"):
        parquet.decode(path, channels=1, classes=10)
    path = write_parquet(tmp_path / "b.parquet", [None, *encoded[1:]], labels.tolist())
    with pytest.raises(DataError, match=r"row 0 of .*b\.parquet has a path but no image bytes"):
        parquet.decode(path, channels=1, classes=10)


def test_labels_outside_the_classes_are_refused(tmp_path: Path) -> None:
    images, _ = pixels(2, 8, 1)
    path = write_parquet(tmp_path / "a.parquet", [encode(image) for image in images], [0, 10])
    with pytest.raises(DataError, match="labels from 0 to 10; expected 0 to 9"):
        parquet.decode(path, channels=1, classes=10)


def test_images_of_different_sizes_are_refused(tmp_path: Path) -> None:
    small, large = pixels(1, 8, 1)[0], pixels(1, 9, 1)[0]
    path = write_parquet(tmp_path / "a.parquet", [encode(small[0]), encode(large[0])], [0, 1])
    with pytest.raises(DataError, match="different sizes"):
        parquet.decode(path, channels=1, classes=10)


def test_a_folder_without_one_of_the_files_is_named(folder: Path) -> None:
    (folder / "mnist" / "test.parquet").unlink()
    with pytest.raises(DataError, match=r"test\.parquet is missing"):
        load("mnist", data_dir=folder)


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="given by --data-dir"):
        load("mnist", data_dir=tmp_path / "nowhere")


def test_a_full_disk_is_told_and_leaves_nothing_behind(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: Any, file: Any) -> None:
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(DataError, match=r"no space left to write .*\.pt.*DDPNOPT_CACHE"):
        load("mnist", data_dir=folder)
    assert list((cache / "decoded").iterdir()) == []


def test_the_hub_is_asked_for_the_right_files_and_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(repository: str, filename: str, *, repo_type: str, local_dir: Path) -> str:
        asked.append((repository, filename, repo_type))
        write_split(local_dir / filename, 20, 32, 3, column="img")
        return str(local_dir / filename)

    fake_hub(monkeypatch, download)
    assert not status("cifar10").present
    assert load("cifar10").x_test.shape == (20, 3, 32, 32)
    assert asked == [
        ("uoft-cs/cifar10", f"plain_text/{split}-00000-of-00001.parquet", "dataset") for split in ("train", "test")
    ]
    fake_hub(monkeypatch, never)
    assert load("cifar10").x_test.shape == (20, 3, 32, 32)
    assert status("cifar10").present


def test_without_network_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    # What the library raises offline: huggingface_hub.errors.LocalEntryNotFoundError has these bases.
    class LocalEntryNotFoundError(FileNotFoundError, ValueError):
        pass

    def offline(*_: Any, **__: Any) -> str:
        raise LocalEntryNotFoundError("Cannot find an appropriate cached snapshot folder\nmore text")

    fake_hub(monkeypatch, offline)
    with pytest.raises(DataError) as error:
        load("svhn")
    message = str(error.value)
    assert "ufldl-stanford/svhn" in message
    assert "--data-dir" in message
    assert "DDPNOPT_DATA" in message
    assert "\n" not in message


def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DataError, match="pip install huggingface_hub"):
        load("mnist")


def test_a_fetched_file_without_the_hubs_checksum_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damaged = True

    def download(repository: str, filename: str, *, repo_type: str, local_dir: Path) -> str:
        path = local_dir / filename
        write_split(path, 20)
        # what the library leaves beside a file: the commit, the hub's tag, which is the SHA-256, and the time
        tag = "0" * 64 if damaged else cache_module.sha256(path)
        kept = local_dir / ".cache" / "huggingface" / "download" / f"{filename}.metadata"
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(f"{'a' * 40}\n{tag}\n0.0\n", encoding="utf-8")
        return str(path)

    fake_hub(monkeypatch, download)
    for _ in range(2):  # also when it is already there
        with pytest.raises(DataError, match=r"train-00000-of-00001\.parquet does not have the hub's SHA-256"):
            load("mnist")
    damaged = False
    (cache / "hub" / "mnist" / "mnist" / "train-00000-of-00001.parquet").unlink()
    assert load("mnist").x_train.shape == (20, 1, 28, 28)
