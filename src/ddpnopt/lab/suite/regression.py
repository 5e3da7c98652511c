"""Regression: a noise-free curve, noisy tables, many outputs, losses scaled in the ways users scale them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sklearn.datasets import load_diabetes
from torch import Tensor, nn

from ddpnopt.lab.suite.data import generator, split, standardised
from ddpnopt.lab.suite.fully_connected import dense
from ddpnopt.lab.suite.measures import digits_of_error, error_of_mean, squared_error
from ddpnopt.lab.suite.task import Batch, Setup, Splits, suite_task


def mean_squared_error(model: nn.Module, batch: Batch) -> Tensor:
    """The plain loss."""
    x, y = batch
    return F.mse_loss(model(x), y)


@suite_task("regression", "-log10 error", "higher", steps=600, batch_size=64)
def wavy_function() -> Setup:
    """A smooth function of one variable without noise: how many digits can be learned?"""
    x = 2 * torch.rand(1000, 1, generator=generator(40)) - 1
    y = torch.sin(9 * x) + 0.5 * torch.sin(4 * x + 1) * x
    splits = split((x, y), 200, 300)
    model = dense([1, 32, 32, 32, 1], nn.Tanh)
    chance = -torch.tensor(error_of_mean(splits.train[1], splits.test[1])).log10().item()
    return Setup(model, splits, mean_squared_error, digits_of_error, chance)


@suite_task("regression", "squared error", "lower", steps=400, batch_size=32)
def noisy_table() -> Setup:
    """Friedman's function of five of twelve columns, with noise of the size of the signal."""
    source = generator(41)
    x = torch.rand(1500, 12, generator=source)
    signal = 10 * torch.sin(torch.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
    y = (signal - 14) / 5 + 0.6 * torch.randn(1500, generator=source)
    splits = split((x, y[:, None]), 300, 500)
    model = dense([12, 64, 64, 1])
    return Setup(model, splits, mean_squared_error, squared_error, error_of_mean(splits.train[1], splits.test[1]))


@suite_task("regression", "squared error", "lower", steps=400, batch_size=32)
def multiple_outputs() -> Setup:
    """Eight outputs of a random network, the error summed over outputs and averaged over samples."""
    source = generator(42)
    x = torch.randn(2000, 10, generator=source)
    first, second = torch.randn(10, 30, generator=source) / 2, torch.randn(30, 8, generator=source) / 4
    y = torch.tanh(x @ first) @ second + 0.1 * torch.randn(2000, 8, generator=source)
    splits = split((x, y), 300, 500)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        inputs, targets = batch
        return ((model(inputs) - targets) ** 2).sum() / len(inputs)

    model = dense([10, 64, 64, 8])
    return Setup(model, splits, loss, squared_error, error_of_mean(splits.train[1], splits.test[1]))


@suite_task("regression", "squared error", "lower", steps=300, batch_size=32)
def diabetes_scaled_loss() -> Setup:
    """Scikit-learn's diabetes data, and a loss that is ten times the mean squared error."""
    bunch = load_diabetes()
    x = torch.tensor(bunch.data, dtype=torch.float32)
    y = torch.tensor(bunch.target, dtype=torch.float32)[:, None]
    parts = split((x, y), 100, 120)
    inputs = standardised(parts.train[0], parts.validation[0], parts.test[0])
    outputs = standardised(parts.train[1], parts.validation[1], parts.test[1])
    train, validation, test = zip(inputs, outputs, strict=True)
    splits = Splits(train, validation, test)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return 10 * mean_squared_error(model, batch)

    model = dense([10, 16, 1])
    return Setup(model, splits, loss, squared_error, error_of_mean(splits.train[1], splits.test[1]))


@suite_task("regression", "nats", "lower", steps=400, batch_size=50)
def mean_and_variance() -> Setup:
    """Predict mean and variance where the noise depends on the input: Gaussian likelihood."""
    source = generator(43)
    x = 4 * torch.rand(1500, 1, generator=source) - 2
    spread = 0.05 + 0.4 * torch.sigmoid(3 * x)
    y = torch.sin(3 * x) + spread * torch.randn(1500, 1, generator=source)
    splits = split((x, y), 300, 600)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        inputs, targets = batch
        mean, spread = model(inputs).chunk(2, dim=1)
        return F.gaussian_nll_loss(mean, targets, F.softplus(spread) + 1e-4)

    train_y, test_y = splits.train[1], splits.test[1]
    constant = train_y.mean().expand_as(test_y), test_y, train_y.var().expand_as(test_y)
    chance = F.gaussian_nll_loss(*constant).item()
    return Setup(dense([1, 48, 48, 2], nn.Tanh), splits, loss, lambda net, data: loss(net, data).item(), chance)


TASKS = (wavy_function, noisy_table, multiple_outputs, diabetes_scaled_loss, mean_and_variance)
