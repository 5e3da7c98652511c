"""The data of a run, kept in the process for the next one."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from ddpnopt.lab.data import IMAGE_SETS, Dataset, canonical, load
from ddpnopt.lab.runs.training import RunConfig, prepare


def data_of(config: RunConfig, data_dir: Path | None) -> Dataset:
    """The split, the subset or the validation split that the configuration asks for."""
    return _data(canonical(config.dataset), config.n_train, config.seed, config.validation, data_dir)


@lru_cache(maxsize=12)
def _data(name: str, n_train: int | None, seed: int, validation: bool, data_dir: Path | None) -> Dataset:
    """Image sets share the whole of their test images, so that a few subsets more cost little."""
    config = RunConfig("", name, seed=seed, n_train=n_train, validation=validation)
    return prepare(config, data_dir, _images(name, data_dir) if name in IMAGE_SETS else None)


@lru_cache(maxsize=1)
def _images(name: str, data_dir: Path | None) -> Dataset:
    """An image set has one split for all seeds; it takes up to a gigabyte, so only one stays."""
    return load(name, data_dir=data_dir)
