"""WINE, DIGITS, Gaussian clusters, and what every data set can do."""

from __future__ import annotations

import pytest
import torch

from ddpnopt.lab.data import DATASETS, gaussian_clusters, load
from ddpnopt.lab.errors import ExperimentError, UnknownNameError


@pytest.mark.parametrize(
    ("name", "samples", "features", "classes"),
    [("wine", 178, 13, 3), ("digits", 1797, 64, 10), ("gaussian-5", 1250, 30, 5)],
)
def test_four_fifths_are_for_training_and_inputs_are_standardised_by_them(
    name: str, samples: int, features: int, classes: int
) -> None:
    data = load(name)
    assert len(data.x_test) == round(samples / 5)
    assert len(data.x_train) + len(data.x_test) == samples
    assert data.shape == (features,)
    assert data.classes == classes == len(data.y_train.unique())
    assert data.x_train.dtype == torch.float32
    torch.testing.assert_close(data.x_train.mean(0), torch.zeros(features), atol=1e-5, rtol=0)
    spread = data.x_train.std(0, correction=0)
    varies = spread > 0
    torch.testing.assert_close(spread[varies], torch.ones(int(varies.sum())), atol=1e-5, rtol=0)


def test_the_seed_decides_the_split() -> None:
    assert torch.equal(load("wine", seed=3).y_test, load("wine", seed=3).y_test)
    assert not torch.equal(load("wine", seed=3).y_test, load("wine", seed=4).y_test)


def test_train_and_test_samples_of_a_split_are_disjoint() -> None:
    data = gaussian_clusters(5)
    rows = torch.cat([data.x_train, data.x_test])
    assert len(rows.unique(dim=0)) == len(rows)


def test_validation_is_cut_from_the_training_data_and_leaves_the_test_set_out() -> None:
    data = load("wine")
    split = data.split_validation(0.25, seed=1)
    together = torch.cat([split.x_train, split.x_test])
    assert len(split.x_test) == round(0.25 * len(data.x_train))
    assert torch.equal(together.unique(dim=0), data.x_train.unique(dim=0))


def test_a_subset_is_drawn_by_its_seed_and_keeps_the_test_set() -> None:
    data = load("digits")
    small = data.subset(100, seed=2)
    assert len(small.x_train) == len(small.y_train) == 100
    assert small.x_test is data.x_test
    assert torch.equal(small.x_train, data.subset(100, seed=2).x_train)
    assert not torch.equal(small.x_train, data.subset(100, seed=3).x_train)


def test_an_epoch_of_batches_meets_every_sample_once() -> None:
    data = gaussian_clusters(3, per_class=30)
    batches = list(data.batches(16, torch.Generator().manual_seed(0)))
    assert [len(y) for _, y in batches] == [16, 16, 16, 16, 8]
    met = torch.cat([x for x, _ in batches])
    assert torch.equal(met.unique(dim=0), data.x_train.unique(dim=0))


@pytest.mark.parametrize("count", [0, 143])
def test_a_subset_larger_than_the_set_is_refused(count: int) -> None:
    with pytest.raises(ExperimentError, match="142 training samples"):
        load("wine").subset(count)


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_a_validation_split_must_leave_both_parts(fraction: float) -> None:
    with pytest.raises(ExperimentError, match="cannot hold out"):
        load("wine").split_validation(fraction)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UnknownNameError) as error:
        load("imagenet")
    assert all(name in str(error.value) for name in DATASETS)


def test_one_cluster_is_no_classification() -> None:
    with pytest.raises(ExperimentError, match="at least 2"):
        load("gaussian-1")
