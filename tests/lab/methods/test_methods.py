"""Every method by its name."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ddpnopt import DDPNOpt
from ddpnopt.lab.errors import ExperimentError, NoDefaultRateError, UnknownNameError
from ddpnopt.lab.methods.registry import (
    ABLATIONS,
    GROWING,
    METHODS,
    PEER_METHODS,
    PROFILED,
    TIMED_METHODS,
    TRAINED_METHODS,
    WINDOW_METHODS,
    make_optimizer,
)

PAPER = [name for name in METHODS if name.startswith("ddpnopt-")]


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[float, float]:
    """The loss of one batch before and after ten steps on it."""
    torch.manual_seed(1)
    x, y = torch.randn(8, 6), torch.randint(3, (8,))
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses[0], losses[-1]


@pytest.mark.parametrize("name", [name for name in TRAINED_METHODS if name != "ddpnopt"])
def test_every_method_lowers_the_loss_at_its_default_learning_rate(name: str) -> None:
    model = small()
    optimizer = make_optimizer(name, model)
    assert optimizer.param_groups[0]["lr"] == METHODS[name].lr
    before, after = step(model, optimizer)
    assert after < before


def test_ddpnopt_lowers_the_loss() -> None:
    model = small()
    before, after = step(model, make_optimizer("ddpnopt", model, lr=0.5))
    assert after < before


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_variants_take_the_exact_hessian_for_an_fcn_and_the_factors_for_a_cnn(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[int, dict[str, object]] = {}

    def note(model: nn.Module, **options: object) -> torch.optim.Optimizer:
        seen[len(seen)] = options
        return torch.optim.SGD(model.parameters(), lr=1.0)

    monkeypatch.setattr("ddpnopt.lab.methods.factories.DDPNOpt", note)
    make_optimizer(name, small())
    make_optimizer(name, nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2)))
    assert (seen[0]["value"], seen[0]["terminal"]) == ("full", "cross_entropy")
    assert (seen[1]["value"], seen[1]["terminal"]) == ("outer", "gn")
    expected = name.removeprefix("ddpnopt-").replace("sgd", "identity")
    assert seen[0]["curvature"] == seen[1]["curvature"] == expected


@pytest.mark.parametrize("name", ["kfac", "ekfac"])
def test_the_kronecker_baselines_have_no_feedback(name: str) -> None:
    optimizer = make_optimizer(name, small())
    assert isinstance(optimizer, DDPNOpt)
    assert not optimizer.feedback


def test_momentum_and_options_reach_the_optimizer() -> None:
    assert make_optimizer("sgd-m", small()).param_groups[0]["momentum"] == 0.9
    assert make_optimizer("adam", small(), lr=0.5, weight_decay=0.1).param_groups[0]["weight_decay"] == 0.1


def test_a_convolutional_network_may_have_a_default_rate_of_its_own() -> None:
    convolutional = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2))
    assert make_optimizer("sgd-m", small()).param_groups[0]["lr"] == 0.03
    assert make_optimizer("sgd-m", convolutional).param_groups[0]["lr"] == 0.05
    assert make_optimizer("sgd-m", convolutional, lr=1.0).param_groups[0]["lr"] == 1.0


def test_an_unknown_method_lists_the_known_ones() -> None:
    with pytest.raises(UnknownNameError) as error:
        make_optimizer("lion", small())
    assert all(name in str(error.value) for name in METHODS)


@pytest.mark.parametrize("options", [{"banana": 1}, {"weight_decay": -1.0}])
def test_an_option_that_cannot_be_is_refused_with_the_method_named(options: dict[str, float]) -> None:
    with pytest.raises(ExperimentError, match="adam: "):
        make_optimizer("adam", small(), **options)


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("sgd", 7e-2, 5e-1), ("rmsprop", 7e-4, 1e-2), ("adam", 7e-4, 1e-2), ("ekfac", 1e-2, 3e-1)],
)
def test_grids_span_the_ranges_of_the_papers_table_and_hold_the_default(name: str, low: float, high: float) -> None:
    grid = METHODS[name].grid
    assert (min(grid), max(grid)) == (low, high)
    assert METHODS[name].lr in grid


def test_every_list_of_a_command_is_part_of_the_one_registry() -> None:
    lists = (TRAINED_METHODS, WINDOW_METHODS, ABLATIONS, TIMED_METHODS, PEER_METHODS, GROWING, PROFILED)
    assert all(name in METHODS for names in lists for name in names)
    assert all(METHODS[name].name == name for name in METHODS)
    assert set(GROWING) | set(PROFILED) | set(PEER_METHODS) <= set(TIMED_METHODS)
    assert all(METHODS[name].lowest_decade is not None for name in (*WINDOW_METHODS[1:], *ABLATIONS))


def test_a_form_without_a_default_rate_says_so() -> None:
    with pytest.raises(NoDefaultRateError, match="uncoupled: "):
        make_optimizer("uncoupled", small())
    assert make_optimizer("uncoupled", small(), lr=0.1).param_groups[0]["lr"] == 0.1
