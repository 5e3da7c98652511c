"""Samples without order: clouds of points with a hinge loss, and the nodes of one graph as one batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt.lab.suite.data import generator, split
from ddpnopt.lab.suite.fully_connected import classifier, dense
from ddpnopt.lab.suite.measures import accuracy, majority_accuracy
from ddpnopt.lab.suite.task import Batch, Setup, Splits, suite_task


def surfaces(number: int = 3000, points: int = 40, noise: float = 0.06) -> Splits:
    """Points on a sphere, a cube, a torus, a cylinder, a helix or two crossed planes, turned at random."""
    source = generator(94)
    label = torch.randint(6, (number,), generator=source)
    u, v, w = torch.rand(3, number, points, generator=source)
    a, b = 2 * torch.pi * u, 2 * v - 1
    flat = torch.sqrt(1 - b**2)
    sphere = torch.stack([flat * a.cos(), flat * a.sin(), b], 2)
    cube = torch.stack([2 * u - 1, b, 2 * w - 1], 2)
    cube = 0.75 * cube / cube.abs().amax(2, keepdim=True)
    tube = 0.75 + 0.3 * (torch.pi * b).cos()
    torus = torch.stack([tube * a.cos(), tube * a.sin(), 0.3 * (torch.pi * b).sin()], 2)
    cylinder = torch.stack([0.6 * a.cos(), 0.6 * a.sin(), 0.9 * b], 2)
    helix = torch.stack([0.7 * (2 * torch.pi * b).cos(), 0.7 * (2 * torch.pi * b).sin(), b], 2)
    first = (w < 0.5).float()
    crossed = 0.8 * torch.stack([(2 * u - 1) * first, b, (2 * u - 1) * (1 - first)], 2)
    x = torch.stack([sphere, cube, torus, cylinder, helix, crossed], 1)[torch.arange(number), label]
    turn, _ = torch.linalg.qr(torch.randn(number, 3, 3, generator=source))
    return split((x @ turn + noise * torch.randn(x.shape, generator=source), label), 500, 700)


class PointNet(nn.Module):
    """The same network for each point, the largest of each feature, a network for the whole."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.each, self.all = dense([3, 32, 32, 64]), dense([64, 48, classes])

    def forward(self, x: Tensor) -> Tensor:
        return self.all(self.each(x).amax(1))


@suite_task("labels", "accuracy %", "higher", steps=500, batch_size=32)
def hinge_point_clouds() -> Setup:
    """Which surface forty points lie on, by the multi-class hinge loss."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x, y = batch
        return F.multi_margin_loss(model(x), y)

    splits = surfaces()
    return Setup(PointNet(6), splits, loss, accuracy, majority_accuracy(splits.test[1]))


class GraphConvolution(nn.Module):
    """Two rounds of averaging over neighbours; returns the logits of the nodes asked for."""

    def __init__(self, features: Tensor, average: Tensor, classes: int, width: int = 24) -> None:
        super().__init__()
        self.features: Tensor
        self.average: Tensor
        self.register_buffer("features", features)
        self.register_buffer("average", average)
        self.first, self.second = nn.Linear(features.shape[1], width), nn.Linear(width, classes)

    def forward(self, nodes: Tensor) -> Tensor:
        h = F.relu(self.average @ self.first(self.features))
        return (self.average @ self.second(h))[nodes]


@suite_task("batch size", "accuracy %", "higher", steps=200, batch_size=120)
def community_graph() -> Setup:
    """Five communities of a graph of 600 nodes, 120 of them labelled: every step sees the whole graph."""
    nodes, classes = 600, 5
    source = generator(95)
    label = torch.randint(classes, (nodes,), generator=source)
    likely = torch.where(label[:, None] == label[None, :], 0.03, 0.008)
    edges = (torch.rand(nodes, nodes, generator=source) < likely).float().triu(1)
    edges = edges + edges.T + torch.eye(nodes)
    degree = edges.sum(1).rsqrt()
    features = 0.35 * torch.randn(classes, 24, generator=source)[label] + torch.randn(nodes, 24, generator=source)
    splits = split((torch.arange(nodes), label), 160, 320)
    return classifier(GraphConvolution(features, degree[:, None] * edges * degree, classes), splits)


TASKS = (hinge_point_clouds, community_graph)
