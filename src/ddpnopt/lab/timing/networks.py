"""The networks whose steps are timed, each with inputs of its own shape."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from ddpnopt.lab import networks as paper
from ddpnopt.lab.data import Dataset
from ddpnopt.lab.errors import UnknownNameError

CLASSES = 10
VOCABULARY, LENGTH = 64, 32
PATTERN = 0.25  # size of a class's pattern in its inputs, relative to the noise; its share of their tokens


@dataclass(frozen=True)
class Network:
    """How to build a network, and what goes into it."""

    name: str
    label: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]
    batch_size: int
    """What is usual for a network of this kind; smaller for the largest, which needs much memory."""
    large: bool = False
    """Whether a decomposition of its Kronecker factors takes minutes."""

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        """Patterns of the classes, most of which is noise: a step that finds out how long it can be depends on them."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            patterns = self.inputs(CLASSES)
        inputs, labels = self.inputs(size), torch.randint(CLASSES, (size,))
        if inputs.is_floating_point():
            return inputs.add_(patterns[labels], alpha=PATTERN), labels
        return torch.where(torch.rand(inputs.shape) < PATTERN, patterns[labels], inputs), labels


def dense(widths: list[int]) -> nn.Sequential:
    """Fully connected, with ReLUs."""
    layers: list[nn.Module] = []
    for n_in, n_out in pairwise(widths):
        layers += [nn.Linear(n_in, n_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class BasicBlock(nn.Module):
    """Two normalised 3x3 convolutions with a skip connection."""

    def __init__(self, n_in: int, n_out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False), nn.BatchNorm2d(n_out)
        self.conv2, self.norm2 = nn.Conv2d(n_out, n_out, 3, 1, 1, bias=False), nn.BatchNorm2d(n_out)
        self.skip = nn.Sequential()
        if stride != 1 or n_in != n_out:
            self.skip = nn.Sequential(nn.Conv2d(n_in, n_out, 1, stride, bias=False), nn.BatchNorm2d(n_out))

    def forward(self, x: Tensor) -> Tensor:
        inside = self.norm1(self.conv1(x)).relu()
        return torch.relu(self.norm2(self.conv2(inside)) + self.skip(x))


def resnet18() -> nn.Sequential:
    """ResNet-18 as it is used on CIFAR-10: a 3x3 stem without pooling."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    widths = [64, 64, 64, 128, 128, 256, 256, 512, 512]
    for n_in, n_out in pairwise(widths):
        layers.append(BasicBlock(n_in, n_out, 1 if n_in == n_out else 2))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, CLASSES))


class TransformerBlock(nn.Module):
    """Attention with its projections as plain linear layers, and a perceptron of two layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, T, width = x.shape
        normed = self.norm1(x)
        q, k, v = (
            layer(normed).view(B, T, self.heads, width // self.heads).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).reshape(B, T, width))
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm2(x))))


class Transformer(nn.Module):
    """A small encoder that classifies sequences."""

    def __init__(self, width: int = 128, blocks: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(x) + self.places)).mean(1))


def shaped(name: str, *shape: int) -> Dataset:
    """Stands in for a data set where only the shape of its inputs matters."""
    x, y = torch.empty(1, *shape), torch.zeros(1, dtype=torch.long)
    return Dataset(name, x, y, x, y, CLASSES)


def channels_last(network: Network) -> Network:
    """The same network and inputs, with the channels of images last in memory."""
    return replace(
        network,
        name=f"{network.name}-last",
        label=f"{network.label}, channels last",
        build=lambda: network.build().to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        inputs=lambda B: network.inputs(B).to(memory_format=torch.channels_last),
    )


_PLAIN = {
    each.name: each
    for each in (
        Network("fcn", "FCN of DIGITS", lambda: paper.fcn(shaped("digits", 64)), lambda B: torch.randn(B, 64), 8),
        Network(
            "cnn", "CNN", lambda: paper.cnn(shaped("cifar10", 3, 32, 32)), lambda B: torch.randn(B, 3, 32, 32), 128
        ),
        Network("wide", "FCN, 1024 wide", lambda: dense([784, 1024, 1024, 10]), lambda B: torch.randn(B, 784), 256),
        Network("resnet18", "ResNet-18", resnet18, lambda B: torch.randn(B, 3, 32, 32), 16, large=True),
        Network("transformer", "Transformer", Transformer, lambda B: torch.randint(VOCABULARY, (B, LENGTH)), 32),
    )
}
NETWORKS = _PLAIN | {last.name: last for last in (channels_last(_PLAIN[name]) for name in ("cnn", "resnet18"))}


def scaled(width: int, depth: int) -> Network:
    """A fully connected network of any size, to see how the cost grows."""
    widths = [width] * (depth + 1)
    name = f"fcn-{width}x{depth}"
    return Network(name, name, lambda: dense([*widths, CLASSES]), lambda B: torch.randn(B, width), 64)


def networks(names: Iterable[str]) -> list[Network]:
    """The networks of these names, each once; an error lists the known ones."""
    chosen = []
    for name in dict.fromkeys(names):
        if name not in NETWORKS:
            raise UnknownNameError("network", name, NETWORKS)
        chosen.append(NETWORKS[name])
    return chosen
