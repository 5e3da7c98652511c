"""A task of one's own for `ddpnopt compare my_task.py`: a model, batches, a loss, and a number to judge by.

Replace the four functions by yours. `batches` may also be a DataLoader, and `evaluate` may be left out.
"""

import torch
import torch.nn.functional as F
from torch import nn

steps = 200
metric = "test accuracy %"

data = torch.Generator().manual_seed(0)
x = torch.randn(1200, 20, generator=data)
y = (x[:, 0] * x[:, 1] + x[:, 2] > 0).long()


def model():
    """A new network with random weights."""
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))


def batches(generator):
    """One pass over the training data in random order; it is called again when it ends."""
    for rows in torch.randperm(1000, generator=generator).split(50):
        yield x[rows], y[rows]


def loss(model, batch):
    """The loss to call backward on."""
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def evaluate(model):
    """On held-out data; higher is better unless the file says better = "lower"."""
    return 100 * (model(x[1000:]).argmax(1) == y[1000:]).float().mean()
