"""The image data sets: where each is looked for, how it is decoded once, and how it becomes a `Dataset`."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ddpnopt.lab.data.cache import DecodedSet, Record
from ddpnopt.lab.data.dataset import Dataset
from ddpnopt.lab.data.hub import FOLDER_VARIABLE, HubFiles, fetch, local_copy
from ddpnopt.lab.data.parquet import decode
from ddpnopt.lab.errors import DataError

SPLITS = ("train", "test")
LOSSY = {"JPEG"}


@dataclass(frozen=True)
class ImageSet:
    """What must be known of a set before it is downloaded."""

    name: str
    channels: int
    size: int
    """Height and width of the original images."""
    hub: HubFiles
    classes: int = 10


IMAGE_SETS = {
    each.name: each
    for each in (
        ImageSet("mnist", 1, 28, HubFiles("ylecun/mnist", "mnist")),
        ImageSet("fashion_mnist", 1, 28, HubFiles("zalando-datasets/fashion_mnist", "fashion_mnist")),
        ImageSet("svhn", 3, 32, HubFiles("ufldl-stanford/svhn", "cropped_digits")),
        ImageSet("cifar10", 3, 32, HubFiles("uoft-cs/cifar10", "plain_text")),
    )
}


@dataclass(frozen=True)
class Place:
    """Where a set's files are, or will be once fetched."""

    files: dict[str, Path]
    fetched: bool
    """From the hub, and not from a folder the user named."""
    decoded: DecodedSet


def user_folder(data_dir: Path | None = None) -> Path | None:
    """The folder the user named, by option or environment, if any; it must exist."""
    chosen = data_dir or (Path(os.environ[FOLDER_VARIABLE]) if os.environ.get(FOLDER_VARIABLE) else None)
    if chosen is None:
        return None
    root = chosen.expanduser().resolve()
    if not root.is_dir():
        given_by = "--data-dir" if data_dir else FOLDER_VARIABLE
        raise DataError(f"{root} (given by {given_by}) is not a folder")
    return root


def find(spec: ImageSet, data_dir: Path | None = None) -> Place:
    """The user's folder if it holds the set (`<folder>/<name>/train.parquet`), the hub otherwise."""
    root = user_folder(data_dir)
    if root is not None:
        folder = root / spec.name
        if folder.is_dir():
            files = {split: folder / f"{split}.parquet" for split in SPLITS}
            for path in files.values():
                if not path.is_file():
                    raise DataError(f"{path} is missing; {folder} must hold train.parquet and test.parquet")
            # Two folders may hold different copies of one set (lossy, shrunk): each has its own cache entry.
            key = hashlib.sha256(str(folder).encode()).hexdigest()[:12]
            return Place(files, fetched=False, decoded=DecodedSet(f"{spec.name}-{key}"))
    files = {split: local_copy(spec.name, spec.hub, split) for split in SPLITS}
    return Place(files, fetched=True, decoded=DecodedSet(f"{spec.name}-hub"))


def load_images(
    spec: ImageSet, data_dir: Path | None = None, report: Callable[[str], None] = lambda _: None
) -> Dataset:
    """The set as standardised float32 tensors: fetched and decoded once, then read from the cache."""
    place = find(spec, data_dir)
    record = place.decoded.record()
    if record is not None and place.decoded.tensors.exists():
        tensors = place.decoded.read(record)
    else:
        tensors, record = _decode_into_cache(spec, place, report)
    mean, std = _channel_statistics(tensors["x_train"])
    return Dataset(
        name=spec.name,
        x_train=_standardise(tensors["x_train"], mean, std),
        y_train=tensors["y_train"],
        x_test=_standardise(tensors["x_test"], mean, std),
        y_test=tensors["y_test"],
        classes=spec.classes,
        note=footnote(spec, record),
    )


def footnote(spec: ImageSet, record: Record) -> str:
    """How these images differ from the original set's; empty if they do not."""
    remarks = []
    height, width = record.shape[1:]
    if (height, width) != (spec.size, spec.size):
        remarks.append(f"resized from {spec.size}x{spec.size} to {height}x{width}")
    if LOSSY.intersection(record.encodings):
        remarks.append("lossy JPEG copies")
    return f"{spec.name}: images {' and '.join(remarks)}" if remarks else ""


def _decode_into_cache(spec: ImageSet, place: Place, report: Callable[[str], None]) -> tuple[dict[str, Tensor], Record]:
    tensors: dict[str, Tensor] = {}
    encodings: set[str] = set()
    for split in SPLITS:
        path = place.files[split]
        if place.fetched:
            report(f"fetching {spec.name} ({split})")
            path = fetch(spec.name, spec.hub, split)
        report(f"decoding {path}, once")
        decoded = decode(path, channels=spec.channels, classes=spec.classes)
        tensors[f"x_{split}"], tensors[f"y_{split}"] = decoded.images, decoded.labels
        encodings |= decoded.encodings
    shape = list(tensors["x_train"].shape[1:])
    if list(tensors["x_test"].shape[1:]) != shape:
        raise DataError(f"{place.files['train']} and {place.files['test']} hold images of different sizes")
    record = place.decoded.write(tensors, list(place.files.values()), shape, sorted(encodings))
    return tensors, record


def _channel_statistics(images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel, exactly, by counting the 256 values of a pixel."""
    levels = torch.arange(256, dtype=torch.float64)
    means, stds = [], []
    for channel in images.unbind(1):
        counts = torch.bincount(channel.flatten(), minlength=256).double()
        share = counts / counts.sum()
        mean = share @ levels
        means.append(mean)
        stds.append((share @ (levels - mean) ** 2).sqrt())
    std = torch.stack(stds)
    return torch.stack(means), torch.where(std > 0, std, torch.ones_like(std))


def _standardise(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    shape = (1, -1, 1, 1)
    # In place: float copies of SVHN take close to a gigabyte each.
    return images.float().sub_(mean.float().view(shape)).div_(std.float().view(shape))
