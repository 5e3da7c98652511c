"""Fully connected classifiers, shallow and deep, all with PyTorch's default initialisation."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from sklearn.datasets import load_wine
from torch import Tensor, nn

from ddpnopt.lab.suite.data import add_noise, flat_digits, generator, split, standardised
from ddpnopt.lab.suite.measures import accuracy, majority_accuracy
from ddpnopt.lab.suite.task import Augment, Batch, Setup, Splits, suite_task


def dense(widths: list[int], activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers with an activation between each two."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1])


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of most classifiers here."""
    x, y = batch
    return F.cross_entropy(model(x), y)


def classifier(model: nn.Module, splits: Splits, augment: Augment | None = None) -> Setup:
    """Cross-entropy for training, accuracy for testing."""
    return Setup(model, splits, cross_entropy, accuracy, majority_accuracy(splits.test[1]), augment)


@suite_task("fully connected", "accuracy %", "higher", steps=400, batch_size=64)
def digits_relu() -> Setup:
    """Noisy digits, three hidden layers; the noise of the training data is drawn for each batch."""
    noisy = flat_digits(0.3)
    splits = Splits(flat_digits().train, noisy.validation, noisy.test)
    return classifier(dense([64, 128, 128, 128, 10]), splits, add_noise(0.3))


@suite_task("fully connected", "accuracy %", "higher", steps=300, batch_size=64)
def digits_tanh() -> Setup:
    """Digits, four narrow hidden layers of tanh."""
    return classifier(dense([64, 20, 20, 20, 20, 10], nn.Tanh), flat_digits(0.3))


@suite_task("fully connected", "nats", "lower", steps=300, batch_size=16)
def wine() -> Setup:
    """Wine from 60 samples and noise, measured by the cross-entropy: 60 test samples are few for accuracy."""
    bunch = load_wine()
    parts = split((torch.tensor(bunch.data, dtype=torch.float32), torch.tensor(bunch.target)), 58, 60)
    x, validation, test = standardised(parts.train[0], parts.validation[0], parts.test[0])
    noise = generator(5)
    validation, test = (z + 0.7 * torch.randn(z.shape, generator=noise) for z in (validation, test))
    splits = Splits((x, parts.train[1]), (validation, parts.validation[1]), (test, parts.test[1]))
    frequencies = parts.test[1].bincount() / len(test)
    chance = -(frequencies * frequencies.log()).sum().item()
    model = dense([13, 16, 16, 3], nn.Tanh)
    return Setup(
        model, splits, cross_entropy, lambda net, data: cross_entropy(net, data).item(), chance, add_noise(0.7)
    )


@suite_task("fully connected", "accuracy %", "higher", steps=600, batch_size=50)
def spirals() -> Setup:
    """Three noisy spiral arms in the plane: easy to write, slow to learn by first-order steps."""
    source = generator(6)
    label = torch.randint(3, (1400,), generator=source)
    radius = torch.rand(1400, generator=source).sqrt()
    angle = 2 * torch.pi * (label / 3 + 1.5 * radius)
    x = radius[:, None] * torch.stack([angle.cos(), angle.sin()], 1) + 0.03 * torch.randn(1400, 2, generator=source)
    return classifier(dense([2, 64, 64, 3], nn.Tanh), split((x, label), 300, 500))


@suite_task("plain deep", "accuracy %", "higher", steps=400, batch_size=64)
def deep_relu_10() -> Setup:
    """Ten plain layers of 64."""
    return classifier(dense([64, *[64] * 9, 10]), flat_digits(0.3))


@suite_task("plain deep", "accuracy %", "higher", steps=600, batch_size=64)
def deep_tanh_20() -> Setup:
    """Twenty plain layers of 32: the signal shrinks by a factor per layer at the default initialisation."""
    return classifier(dense([64, *[32] * 19, 10], nn.Tanh), flat_digits(0.2))


@suite_task("plain deep", "accuracy %", "higher", steps=600, batch_size=64)
def deep_sigmoid_6() -> Setup:
    """Six layers of sigmoids, whose gradients vanish."""
    return classifier(dense([64, *[32] * 5, 10], nn.Sigmoid), flat_digits(0.2))


TASKS = (digits_relu, digits_tanh, wine, spirals, deep_relu_10, deep_tanh_20, deep_sigmoid_6)
