"""Baselines by their short names."""

from __future__ import annotations

import pytest
import torch

from ddpnopt.lab.baselines import EMSA, SGDVGR, EKFACOptimizer, KFACOptimizer, VanillaDDP
from ddpnopt.lab.data import Dataset
from ddpnopt.lab.errors import ExperimentError
from ddpnopt.lab.methods.registry import METHODS, make_optimizer
from ddpnopt.lab.networks import build
from ddpnopt.lab.runs.classification import ClassificationTask
from ddpnopt.lab.runs.config import RunConfig
from ddpnopt.lab.runs.outcome import Outcome
from ddpnopt.lab.runs.training import train

KINDS = {"emsa": EMSA, "vanilla-ddp": VanillaDDP, "sgd-vgr": SGDVGR, "kfac": KFACOptimizer, "ekfac": EKFACOptimizer}


@pytest.fixture(autouse=True)
def _float32() -> None:
    torch.set_default_dtype(torch.float32)


def pictures() -> Dataset:
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(12, 1, 8, 8, generator=g), torch.arange(12) % 3
    return Dataset("wine", x, y, x, y, 3)


def trained(name: str, task: ClassificationTask, data: Dataset, **options: float) -> Outcome:
    return train(RunConfig(name, task, options=options), task.problem_on(data, 0))


@pytest.mark.parametrize(("name", "kind"), KINDS.items())
def test_a_baseline_is_made_by_its_name(name: str, kind: type) -> None:
    optimizer = make_optimizer(name, build("fcn", pictures(), 0))
    assert isinstance(optimizer, kind)
    assert optimizer.param_groups[0]["lr"] == METHODS[name].lr


def test_options_reach_the_baseline() -> None:
    model = build("fcn", pictures(), 0)
    assert make_optimizer("emsa", model).param_groups[0]["rho"] == 1.0
    assert make_optimizer("emsa", model, rho=0.5, reg=0.0).param_groups[0]["rho"] == 0.5
    assert make_optimizer("emsa", build("cnn", pictures(), 0)).param_groups[0]["rho"] == 0.03


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("network", ["fcn", "sigmoid-fcn"])
def test_every_baseline_trains_the_fully_connected_networks(name: str, network: str) -> None:
    result = trained(name, ClassificationTask("pictures", network, 1, 6), pictures())
    assert result.steps == 2
    assert not result.diverged


@pytest.mark.parametrize("name", ["emsa", "kfac", "ekfac"])
def test_those_which_can_train_the_convolutional_network(name: str) -> None:
    result = trained(name, ClassificationTask("pictures", "cnn", 1, 6), pictures())
    assert not result.diverged


def test_emsa_trains_the_papers_cnn_in_a_few_steps() -> None:
    y = torch.arange(30) % 3
    x = 0.3 * torch.randn(30, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    for image, label in zip(x, y.tolist(), strict=True):
        image[:, :, 2 * label : 2 * label + 3] += 1.0  # a bar whose place tells the class
    bars = Dataset("bars", x, y, x, y, 3)
    result = trained("emsa", ClassificationTask("bars", "cnn", 5, 30), bars, rho=0.3)
    assert result.train_loss < 0.5 * result.curve.losses[0]


@pytest.mark.parametrize("name", ["vanilla-ddp", "sgd-vgr"])
def test_those_which_cannot_say_so(name: str) -> None:
    with pytest.raises(ExperimentError, match=f"{name}: .*fully connected networks.*Conv2d"):
        trained(name, ClassificationTask("pictures", "cnn"), pictures())


def test_emsa_says_that_a_residual_network_is_no_chain() -> None:
    with pytest.raises(ExperimentError, match=r"emsa: .*chain of layers"):
        make_optimizer("emsa", build("resnet", pictures(), 0))
