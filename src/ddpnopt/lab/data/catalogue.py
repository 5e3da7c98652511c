"""Every data set by its name."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ddpnopt.lab.data import tabular
from ddpnopt.lab.data.cache import sha256
from ddpnopt.lab.data.dataset import Dataset
from ddpnopt.lab.data.images import IMAGE_SETS, find, footnote, load_images
from ddpnopt.lab.data.parquet import row_count
from ddpnopt.lab.errors import DataError, UnknownNameError

# The numbers of clusters of the paper's appendix; any other number is read from the name as well.
GAUSSIAN = tuple(f"gaussian-{classes}" for classes in (5, 8, 12, 15))
DATASETS = ("wine", "digits", *IMAGE_SETS, *GAUSSIAN)
ALIASES = {"fashion-mnist": "fashion_mnist", "fmnist": "fashion_mnist", "cifar-10": "cifar10"}


def canonical(name: str) -> str:
    """The name as it is listed, or an error that lists the names."""
    lowered = name.lower()
    lowered = ALIASES.get(lowered, lowered)
    if lowered not in DATASETS and not re.fullmatch(r"gaussian-\d+", lowered):
        raise UnknownNameError("data set", name, DATASETS)
    return lowered


def load(
    name: str,
    *,
    seed: int = 0,
    data_dir: Path | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Dataset:
    """The data set called `name`.

    `seed` draws the 80/20 split of WINE and DIGITS, and the clusters; the image sets have their own split.
    """
    name = canonical(name)
    if name in IMAGE_SETS:
        return load_images(IMAGE_SETS[name], data_dir, report)
    if name == "wine":
        return tabular.wine(seed)
    if name == "digits":
        return tabular.digits(seed)
    return tabular.gaussian_clusters(int(name.removeprefix("gaussian-")), seed)


@dataclass(frozen=True)
class DatasetStatus:
    """What is known of a data set without loading it."""

    name: str
    place: str
    present: bool
    train: int | None = None
    test: int | None = None
    shape: tuple[int, ...] = ()
    checksums: dict[str, str] = field(default_factory=dict)
    note: str = ""


def status(name: str, data_dir: Path | None = None) -> DatasetStatus:
    """Where a data set is, how large it is, and the SHA-256 of its files."""
    name = canonical(name)
    if name not in IMAGE_SETS:
        dataset = load(name)
        place = "generated" if name.startswith("gaussian") else "scikit-learn"
        return DatasetStatus(name, place, True, len(dataset.y_train), len(dataset.y_test), dataset.shape)
    spec = IMAGE_SETS[name]
    try:
        found = find(spec, data_dir)
        record = found.decoded.record()
        present = all(path.is_file() for path in found.files.values())
        if not present and record is None:
            return DatasetStatus(name, f"not here; the hub has {spec.hub.repository}", False)
        place = str(next(iter(found.files.values())).parent)
        if record is None:
            rows = {split: row_count(path) for split, path in found.files.items()}
            sums = {split: sha256(path) for split, path in found.files.items()}
            return DatasetStatus(name, place, True, rows["train"], rows["test"], (), sums)
        recorded = [record.sources[str(path)] for path in found.files.values()]
        return DatasetStatus(
            name,
            place if present else str(found.decoded.tensors),
            True,
            record.train,
            record.test,
            tuple(record.shape),
            dict(zip(found.files, recorded, strict=True)),
            footnote(spec, record),
        )
    except (DataError, KeyError) as broken:
        return DatasetStatus(name, "damaged", False, note=str(broken))
