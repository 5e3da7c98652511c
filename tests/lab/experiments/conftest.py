"""Every test has its own empty cache and sees none of the machine's data folders."""

from __future__ import annotations

from pathlib import Path

import pytest
from parquet_folder import write_split


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DDPNOPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("DDPNOPT_DATA", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """`mnist` as PNG, `cifar10` as PNG in the column `img`, `svhn` of 28x28."""
    root = tmp_path / "data"
    for split, count in (("train", 40), ("test", 20)):
        write_split(root / "mnist" / f"{split}.parquet", count)
        write_split(root / "cifar10" / f"{split}.parquet", count, 32, 3, column="img")
        write_split(root / "svhn" / f"{split}.parquet", count, 28, 3)
    return root
