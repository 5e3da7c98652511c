"""What the baselines cannot do they say, and change nothing."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.nn.functional as F
from baseline_networks import Skip, backward, cnn, fcn, images, vectors, weights
from torch import Tensor, nn

from ddpnopt import ModelError, NonFiniteError, OptionError, StepError
from ddpnopt.lab.baselines import EMSA, SGDVGR, VanillaDDP

MAKERS = [EMSA, VanillaDDP, lambda model: SGDVGR(model, 0.1)]
every = pytest.mark.parametrize("make", MAKERS, ids=["emsa", "vanilla", "vgr"])


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.last = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.a(torch.tanh(self.a(x)))))


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if x.sum() > 0 else -self.a(x)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.a(x) + y


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x)


@every
@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Skip, "chain of layers.*skip connections"),
        (Shared, "'a' runs more than once"),
        (Branching, "could not take the model apart"),
        (TwoInputs, "one input|several inputs"),
        (Unused, "'b' is not called"),
        (lambda: nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 3)), r"'0\.weight' belongs to no layer's stage"),
        (nn.Tanh, "no trainable parameters"),
    ],
)
def test_a_network_that_is_no_chain_is_refused(make, model, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        make(model())


@pytest.mark.parametrize("make", MAKERS[1:], ids=["vanilla", "vgr"])
def test_convolutions_are_refused_where_only_fully_connected_networks_go(make) -> None:
    with pytest.raises(ModelError, match="fully connected networks, but '0' is a Conv2d"):
        make(cnn())


@every
@pytest.mark.parametrize("kind", [lambda: nn.BatchNorm1d(6), nn.Dropout], ids=["batch norm", "dropout"])
def test_batch_norm_and_dropout_in_training_are_refused_and_in_eval_mode_taken(make, kind) -> None:
    module = kind()
    model = nn.Sequential(nn.Linear(5, 6), module, nn.Tanh(), nn.Linear(6, 3))
    opt = make(model)
    x, y = vectors()
    before = weights(model)
    backward(model, opt, x, y)
    with pytest.raises(ModelError, match=r"batch norm '1'|dropout '1'"):
        opt.step()
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))
    module.eval()
    backward(model, opt, x, y)
    opt.step()
    assert not torch.equal(before[0], weights(model)[0])


def test_vanilla_ddp_names_the_stage_that_cannot_be_differentiated() -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6), nn.RReLU(), nn.Linear(6, 3))
    opt = VanillaDDP(model)
    backward(model, opt, *vectors())
    with pytest.raises(ModelError, match="cannot use this network: dynamics at stage 1"):
        opt.step()


@every
def test_step_needs_one_backward_pass(make) -> None:
    model = fcn()
    opt = make(model)
    x, y = vectors()
    with pytest.raises(StepError, match="no forward pass"):
        opt.step()
    model(x)
    with pytest.raises(StepError, match="without a backward pass"):
        opt.step()
    for _ in range(2):
        F.cross_entropy(model(x), y).backward()
    with pytest.raises(StepError, match="2 backward passes"):
        opt.step()


@every
def test_what_is_not_finite_changes_nothing(make) -> None:
    model = fcn()
    opt = make(model)
    x, y = vectors()
    x[0, 0] = torch.nan
    before = weights(model)
    backward(model, opt, x, y)
    with pytest.raises(NonFiniteError, match="not finite"):
        opt.step()
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (lambda m: EMSA(m, rho=-1.0), "rho=-1.0"),
        (lambda m: EMSA(m, reg=-1.0), "reg=-1.0"),
        (lambda m: EMSA(m, max_iter=0), "max_iter=0"),
        (lambda m: EMSA(m, 0.0), "lr=0.0"),
        (lambda m: VanillaDDP(m, damping=0.0), "damping=0.0"),
        (lambda m: VanillaDDP(m, tries=0), "tries=0"),
        (lambda m: VanillaDDP(m, -1.0), "lr=-1.0"),
        (lambda m: VanillaDDP(m, loss="hinge"), "loss='hinge'"),
        (lambda m: VanillaDDP(m, reduction="none"), "reduction='none'"),
        (lambda m: SGDVGR(m, -0.1), "lr=-0.1"),
        (lambda m: SGDVGR(m, 0.1, weight=-2.0), "weight=-2.0"),
    ],
)
def test_settings_out_of_range_are_named(make, option: str) -> None:
    with pytest.raises(OptionError, match=option):
        make(fcn())


@every
def test_parameters_in_place_of_a_model_are_refused(make) -> None:
    with pytest.raises(OptionError, match="must be an"):
        make(list(fcn().parameters()))


@every
def test_it_cannot_be_pickled_and_says_what_to_do(make) -> None:
    with pytest.raises(TypeError, match="state_dict"):
        pickle.dumps(make(fcn()))


@every
def test_further_parameter_groups_are_refused(make) -> None:
    with pytest.raises(OptionError, match="no further groups"):
        make(fcn()).add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def test_a_single_layer_is_a_chain() -> None:
    model = nn.Linear(5, 3)
    opt = EMSA(model)
    x, y = vectors()
    before = float(backward(model, opt, x, y))
    opt.step()
    assert float(backward(model, opt, x, y)) < before


def test_a_frozen_layer_is_part_of_the_stage_before_it() -> None:
    model = fcn()
    model[2].requires_grad_(False)
    opt = EMSA(model)
    assert len(opt.stages) == 2
    frozen = model[2].weight.clone()
    x, y = vectors()
    before = float(backward(model, opt, x, y))
    opt.step()
    assert torch.equal(frozen, model[2].weight)
    assert float(backward(model, opt, x, y)) < before


def test_images_of_any_size_go_through_emsa() -> None:
    model = cnn()
    opt = EMSA(model)
    x, y = images(5)
    backward(model, opt, x, y)
    opt.step()
