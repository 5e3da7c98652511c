"""The networks have the shapes of the paper and are drawn from their seed alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddpnopt.lab.data import Dataset, load
from ddpnopt.lab.errors import ExperimentError, UnknownNameError
from ddpnopt.lab.networks import NETWORKS, build


def images(name: str, *shape: int) -> Dataset:
    x, y = torch.randn(4, *shape), torch.arange(4)
    return Dataset(name, x, y, x, y, classes=10)


def widths(model: nn.Module) -> list[int]:
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return [layers[0].in_features, *(layer.out_features for layer in layers)]


def test_digits_is_learned_by_the_five_layers_of_the_paper() -> None:
    model = build("fcn", load("digits"), 0)
    assert widths(model) == [64, 20, 20, 20, 20, 10]
    assert sum(isinstance(module, nn.Tanh) for module in model.modules()) == 4


def test_wine_ends_in_a_sigmoid() -> None:
    data = load("wine")
    outputs = build("fcn", data, 0)(data.x_test)
    assert outputs.min() >= 0
    assert outputs.max() <= 1


def test_mnist_is_learned_by_relu_layers_of_32() -> None:
    model = build("fcn", images("mnist", 1, 28, 28), 0)
    assert widths(model) == [784, 32, 32, 32, 32, 10]
    assert sum(isinstance(module, nn.ReLU) for module in model.modules()) == 4


def test_the_vanishing_gradient_network_has_nine_sigmoid_layers() -> None:
    model = build("sigmoid-fcn", load("digits"), 0)
    assert len(widths(model)) == 10
    assert sum(isinstance(module, nn.Sigmoid) for module in model.modules()) == 8


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 28, 28), (3, 32, 32)])
@pytest.mark.parametrize("name", [name for name in NETWORKS if not name.endswith("fcn")])
def test_convolutional_networks_take_every_image_shape(name: str, shape: tuple[int, ...]) -> None:
    data = images("mnist", *shape)
    assert build(name, data, 0)(data.x_train).shape == (4, 10)


def test_the_cnn_has_four_convolutions_of_32_channels_and_two_linear_layers() -> None:
    model = build("cnn", images("cifar10", 3, 32, 32), 0)
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert [module.out_channels for module in convolutions] == [32] * 4
    assert {module.kernel_size for module in convolutions} == {(3, 3)}
    assert sum(isinstance(module, nn.Linear) for module in model.modules()) == 2


def test_the_seed_decides_the_weights_and_the_global_random_state_stays() -> None:
    data = load("wine")
    before = torch.get_rng_state()
    first, same, other = (next(build("fcn", data, seed).parameters()) for seed in (0, 0, 1))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert torch.equal(before, torch.get_rng_state())


def test_an_unknown_network_lists_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match="fcn, cnn"):
        build("transformer", load("wine"), 0)


def test_a_cnn_on_a_table_is_refused() -> None:
    with pytest.raises(ExperimentError, match="needs images"):
        build("cnn", load("wine"), 0)
