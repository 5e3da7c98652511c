"""Classification with other labels than one clean class per sample, and with very large or very small batches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn

from ddpnopt.lab.suite.data import (
    add_noise,
    flat_digits,
    generator,
    jitter_and_flip,
    scattered_digits,
    split,
    standardised,
    textured_shapes,
)
from ddpnopt.lab.suite.fully_connected import classifier, dense
from ddpnopt.lab.suite.measures import accuracy, majority_accuracy, mean_average_precision, positive_share
from ddpnopt.lab.suite.task import Batch, Setup, Splits, suite_task
from ddpnopt.lab.suite.vision import plain_cnn


@suite_task("labels", "average precision %", "higher", steps=400, batch_size=50)
def multi_label() -> Setup:
    """Ten labels of different frequency from a random network, each present or not."""
    source = generator(50)
    x = torch.randn(2200, 20, generator=source)
    first, second = torch.randn(20, 24, generator=source) / 3, torch.randn(24, 10, generator=source)
    scores = torch.tanh(x @ first) @ second + 0.7 * torch.randn(2200, 10, generator=source)
    thresholds = torch.stack([scores[:, k].quantile(0.55 + 0.035 * k) for k in range(10)])
    splits = split((x, (scores > thresholds).float()), 400, 700)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        inputs, labels = batch
        return F.binary_cross_entropy_with_logits(model(inputs), labels)

    return Setup(dense([20, 96, 96, 10]), splits, loss, mean_average_precision, positive_share(splits.test[1]))


@suite_task("labels", "average precision %", "higher", steps=400, batch_size=64)
def imbalanced() -> Setup:
    """One positive in twenty, weighted by `pos_weight`."""
    source = generator(51)
    x = torch.randn(6000, 12, generator=source)
    score = (x[:, 0] * x[:, 1] + x[:, 2] ** 2 + torch.sin(2 * x[:, 3])) + 0.5 * torch.randn(6000, generator=source)
    splits = split((x, (score > score.quantile(0.95)).float()[:, None]), 1500, 1500)
    weight = torch.tensor([5.0])

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        inputs, labels = batch
        return F.binary_cross_entropy_with_logits(model(inputs), labels, pos_weight=weight)

    return Setup(dense([12, 64, 64, 1]), splits, loss, mean_average_precision, positive_share(splits.test[1]))


@suite_task("labels", "accuracy %", "higher", steps=400, batch_size=50)
def label_noise() -> Setup:
    """Digits on a canvas; 30 % of the training labels are drawn at random, those of the other splits are right."""
    splits = scattered_digits(12, 0.15, 3)
    source = generator(52)
    x, y = splits.train
    wrong = torch.rand(len(y), generator=source) < 0.3
    noisy = torch.where(wrong, torch.randint(10, y.shape, generator=source), y)
    return classifier(plain_cnn(1, 10, 12), Splits((x, noisy), splits.validation, splits.test))


@suite_task("labels", "accuracy %", "higher", steps=400, batch_size=50)
def smoothing_and_augmentation() -> Setup:
    """Smoothed labels, shifted and mirrored pictures."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y, label_smoothing=0.1)

    splits = textured_shapes()
    model = plain_cnn(3, 8)
    return Setup(model, splits, loss, accuracy, majority_accuracy(splits.test[1]), jitter_and_flip)


@suite_task("batch size", "accuracy %", "higher", steps=200, batch_size=1000)
def whole_set() -> Setup:
    """Noisy digits, each batch the whole training set."""
    return classifier(dense([64, 64, 64, 10]), flat_digits(0.3))


@suite_task("batch size", "accuracy %", "higher", steps=1000, batch_size=4)
def batch_of_four() -> Setup:
    """Noisy digits, four per batch."""
    return classifier(dense([64, 64, 64, 10]), flat_digits(0.3))


@suite_task("batch size", "nats", "lower", steps=300, batch_size=8)
def batch_of_eight_dropout() -> Setup:
    """Breast cancer with few features and noise, eight per batch, with dropout."""
    bunch = load_breast_cancer()
    parts = split((torch.tensor(bunch.data[:, :10], dtype=torch.float32), torch.tensor(bunch.target)), 150, 200)
    noise = generator(53)
    x = standardised(parts.train[0], parts.validation[0], parts.test[0])
    validation, test = (z + 0.8 * torch.randn(z.shape, generator=noise) for z in x[1:])
    splits = Splits((x[0], parts.train[1]), (validation, parts.validation[1]), (test, parts.test[1]))

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(model(inputs), labels)

    model = nn.Sequential(
        nn.Linear(10, 48), nn.ReLU(), nn.Dropout(0.2), nn.Linear(48, 48), nn.ReLU(), nn.Dropout(0.2), nn.Linear(48, 2)
    )
    frequencies = splits.train[1].bincount() / len(splits.train[1])
    chance = -frequencies.log()[splits.test[1]].mean().item()
    return Setup(model, splits, loss, lambda net, data: loss(net, data).item(), chance, add_noise(0.8))


TASKS = (
    multi_label,
    imbalanced,
    label_noise,
    smoothing_and_augmentation,
    whole_set,
    batch_of_four,
    batch_of_eight_dropout,
)
