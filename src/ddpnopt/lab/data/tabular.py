"""The data sets that need no download: WINE, DIGITS and Gaussian clusters."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ddpnopt.lab.data.dataset import Dataset, standardised
from ddpnopt.lab.errors import ExperimentError

TEST_FRACTION = 0.2


def wine(seed: int = 0) -> Dataset:
    """178 wines, 13 measurements, 3 growers."""
    return _from_sklearn("wine", seed)


def digits(seed: int = 0) -> Dataset:
    """1,797 handwritten digits of 8x8 pixels."""
    return _from_sklearn("digits", seed)


def gaussian_clusters(
    classes: int,
    seed: int = 0,
    *,
    dimension: int = 30,
    per_class: int = 250,
    noise: float = 1.0,
) -> Dataset:
    """`classes` isotropic Gaussian clusters round centres drawn from N(0, I), as in the paper's appendix.

    The paper gives the dimension (30) and the numbers of classes (5, 8, 12, 15) alone. In 30 dimensions two
    such centres lie about sqrt(60) apart, so that unit noise leaves the clusters separate but not trivial.
    """
    if classes < 2:
        raise ExperimentError(f"Gaussian clusters need at least 2 classes, not {classes}")
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, dimension, generator=generator)
    y = torch.arange(classes).repeat_interleave(per_class)
    x = centres[y] + noise * torch.randn(len(y), dimension, generator=generator)
    return _split(f"gaussian-{classes}", x, y, classes, generator)


def _from_sklearn(name: str, seed: int) -> Dataset:
    x, y, classes = _read(name)
    return _split(name, x, y, classes, torch.Generator().manual_seed(seed))


@cache
def _read(name: str) -> tuple[Tensor, Tensor, int]:
    """Once in a process: to read the text takes as long as to train a small network for an epoch."""
    from sklearn import datasets

    bunch = {"wine": datasets.load_wine, "digits": datasets.load_digits}[name]()
    x = torch.as_tensor(bunch.data, dtype=torch.float64)
    return x, torch.as_tensor(bunch.target, dtype=torch.int64), len(bunch.target_names)


def _split(name: str, x: Tensor, y: Tensor, classes: int, generator: torch.Generator) -> Dataset:
    order = torch.randperm(len(x), generator=generator)
    n_test = round(len(x) * TEST_FRACTION)
    test, train = order[:n_test], order[n_test:]
    x_train, x_test = standardised(x[train], x[test], dims=(0,))
    return Dataset(name, x_train.float(), y[train], x_test.float(), y[test], classes)
