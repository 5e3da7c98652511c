"""Metrics on held-out data, and the same metrics without learning."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from sklearn.metrics import average_precision_score
from torch import Tensor, nn

from ddpnopt.lab.suite.task import Batch


def accuracy(model: nn.Module, data: Batch) -> float:
    """Share of right classes in percent."""
    x, y = data
    return 100 * (model(x).argmax(1) == y).double().mean().item()


def majority_accuracy(y: Tensor) -> float:
    """Accuracy of always naming the most frequent class."""
    return 100 * y.bincount().max().item() / len(y)


def squared_error(model: nn.Module, data: Batch) -> float:
    """Mean squared error per output."""
    x, y = data
    return F.mse_loss(model(x), y).item()


def error_of_mean(train: Tensor, test: Tensor) -> float:
    """Mean squared error of predicting the mean of the training targets."""
    return F.mse_loss(train.mean(0).expand_as(test), test).item()


def digits_of_error(model: nn.Module, data: Batch) -> float:
    """-log10 of the mean squared error: how many digits of a noise-free target are right, doubled."""
    return -math.log10(max(squared_error(model, data), 1e-30))


def mean_average_precision(model: nn.Module, data: Batch) -> float:
    """Area under precision and recall in percent, averaged over labels."""
    x, y = data
    scores = model(x).double()
    if not torch.isfinite(scores).all():
        return math.nan
    return 100 * float(average_precision_score(y.numpy(), scores.numpy(), average="macro"))


def positive_share(y: Tensor) -> float:
    """Average precision of scores drawn at random."""
    return 100 * y.double().mean().item()
