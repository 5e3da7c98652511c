"""The networks of the paper, by name, shaped to a data set; PyTorch's default initialisation throughout."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from ddpnopt.lab.data import Dataset
from ddpnopt.lab.errors import ExperimentError, UnknownNameError

# "Hidden dimension from 10 to 32 depending on the size of the data set", tanh on WINE and DIGITS alone.
HIDDEN = {"wine": 10, "digits": 20}
TANH = {"wine", "digits"}
DEFAULT_HIDDEN = 32
CHANNELS = 32


def fcn(dataset: Dataset) -> nn.Sequential:
    """Five fully connected layers."""
    hidden = HIDDEN.get(dataset.name, DEFAULT_HIDDEN)
    activation = nn.Tanh if dataset.name in TANH else nn.ReLU
    layers = _dense([math.prod(dataset.shape), *[hidden] * 4, dataset.classes], activation)
    if dataset.name == "wine":  # "to help distinguish the performance among optimizers" (appendix)
        layers.append(nn.Sigmoid())
    return layers


def fcn6(dataset: Dataset) -> nn.Sequential:
    """Six fully connected layers of width 32: what fits the paper's DIGITS tables best ("5-6 layers", "10-32")."""
    activation = nn.Tanh if dataset.name in TANH else nn.ReLU
    return _dense([math.prod(dataset.shape), *[DEFAULT_HIDDEN] * 5, dataset.classes], activation)


def sigmoid_fcn(dataset: Dataset) -> nn.Sequential:
    """Nine fully connected layers with sigmoids: the network of the vanishing gradients."""
    return _nine(dataset, HIDDEN.get(dataset.name, DEFAULT_HIDDEN), nn.Sigmoid)


def _nine(dataset: Dataset, hidden: int, activation: type[nn.Module]) -> nn.Sequential:
    return _dense([math.prod(dataset.shape), *[hidden] * 8, dataset.classes], activation)


def cnn(dataset: Dataset) -> nn.Sequential:
    """Four 3x3 convolutions of 32 channels and two fully connected layers.

    The paper does not say where it pools. Here: after the first, second and fourth convolution, which halves
    28x28 or 32x32 three times and leaves the costly convolutions on small images.
    """
    channels, height, width = _image_shape(dataset)
    layers: list[nn.Module] = []
    for number in range(1, 5):
        layers += [nn.Conv2d(channels if number == 1 else CHANNELS, CHANNELS, 3, padding=1), nn.ReLU()]
        if number != 3:
            layers.append(nn.MaxPool2d(2))
    features = CHANNELS * (height // 8) * (width // 8)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, 64), nn.ReLU(), nn.Linear(64, dataset.classes))


Norm = Literal["none", "group", "batch"]


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with a skip connection, which is a 1x1 convolution where the shape changes."""

    def __init__(self, channels_in: int, channels_out: int, stride: int, norm: Norm) -> None:
        super().__init__()
        bias = norm == "none"
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=bias)
        self.norm1 = _norm(norm, channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=bias)
        self.norm2 = _norm(norm, channels_out)
        same = channels_in == channels_out and stride == 1
        self.skip = nn.Identity() if same else nn.Conv2d(channels_in, channels_out, 1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        inside = self.norm1(self.conv1(x)).relu()
        return torch.relu(self.skip(x) + self.norm2(self.conv2(inside)))


def resnet(dataset: Dataset, norm: Norm = "none") -> nn.Sequential:
    """A small residual network: a stem, three blocks, the mean over positions, one linear layer."""
    channels, _, _ = _image_shape(dataset)
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1),
        nn.ReLU(),
        ResidualBlock(16, 16, 1, norm),
        ResidualBlock(16, 32, 2, norm),
        ResidualBlock(32, 32, 2, norm),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, dataset.classes),
    )


NETWORKS: dict[str, Callable[[Dataset], nn.Module]] = {
    "fcn": fcn,
    "cnn": cnn,
    "fcn-6": fcn6,
    "sigmoid-fcn": sigmoid_fcn,
    "sigmoid-9": lambda dataset: _nine(dataset, DEFAULT_HIDDEN, nn.Sigmoid),
    "relu-9": lambda dataset: _nine(dataset, DEFAULT_HIDDEN, nn.ReLU),
    "resnet": resnet,
    "resnet-gn": lambda dataset: resnet(dataset, "group"),
    "resnet-bn": lambda dataset: resnet(dataset, "batch"),
}


def known(name: str) -> str:
    """The name itself, or an error that lists the names."""
    if name not in NETWORKS:
        raise UnknownNameError("network", name, NETWORKS)
    return name


def build(name: str, dataset: Dataset, seed: int) -> nn.Module:
    """The network called `name`, its weights drawn from `seed`; the global random state is left as it was."""
    known(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # on the CPU convolution and, above all, max pooling are much faster with the channels last in memory
        model = NETWORKS[name](dataset)
        return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _dense(widths: list[int], activation: type[nn.Module]) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Flatten()]
    for n_in, n_out in pairwise(widths):
        layers += [nn.Linear(n_in, n_out), activation()]
    return nn.Sequential(*layers[:-1])  # the last layer's outputs are the logits


def _image_shape(dataset: Dataset) -> tuple[int, int, int]:
    if len(dataset.shape) != 3 or min(dataset.shape[1:]) < 8:
        raise ExperimentError(
            f"{dataset.name} has inputs of shape {dataset.shape}; a convolutional network needs images of at "
            "least 8x8: take --network fcn"
        )
    channels, height, width = dataset.shape
    return channels, height, width


def _norm(kind: Norm, channels: int) -> nn.Module:
    if kind == "group":
        return nn.GroupNorm(4, channels)
    return nn.BatchNorm2d(channels) if kind == "batch" else nn.Identity()
