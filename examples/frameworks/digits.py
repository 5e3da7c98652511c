"""Shared by the examples: the handwritten digits of scikit-learn and a small network."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset


def data() -> tuple[TensorDataset, TensorDataset]:
    """1,437 training and 360 test images of 64 pixels."""
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    return TensorDataset(x[train], y[train]), TensorDataset(x[test], y[test])


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))


@torch.no_grad()
def accuracy(model: nn.Module, test: TensorDataset) -> float:
    """In percent."""
    x, y = test.tensors
    model.eval()
    outputs: Tensor = model(x)
    return 100 * float((outputs.argmax(1) == y).float().mean())
