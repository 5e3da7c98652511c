"""Small graphs, many per batch: attention between neighbours, a property of the whole graph."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt.lab.suite.data import generator, split
from ddpnopt.lab.suite.measures import error_of_mean
from ddpnopt.lab.suite.task import Batch, Setup, Splits, suite_task

KINDS = 5


def molecules(number: int = 4000, most: int = 12) -> Splits:
    """Random trees with two rings closed, atoms of five kinds; each atom's part depends on it and its neighbours."""
    source = generator(177)
    size = torch.randint(6, most + 1, (number, 1), generator=source)
    there = torch.arange(most) < size
    kind = torch.randint(KINDS, (number, most), generator=source)
    bond = torch.zeros(number, most, most)
    for atom in range(1, most):
        parent = (torch.rand(number, generator=source) * atom).long()
        bond[torch.arange(number), atom, parent] = 1
    for _ in range(2):
        one, other = (torch.rand(2, number, 1, generator=source) * size).long()[:, :, 0]
        bond[torch.arange(number), one, other] = 1
    bond = (bond + bond.transpose(1, 2)).clamp_max(1) * there[:, :, None] * there[:, None, :]
    bond = bond * (1 - torch.eye(most))
    charge = torch.randn(KINDS, generator=source)
    pull = torch.randn(KINDS, KINDS, generator=source)
    between = pull[kind[:, :, None], kind[:, None, :]] * bond
    part = torch.relu(charge[kind] + between.sum(2)) * there
    far = torch.relu(bond @ part[:, :, None] - 1)[:, :, 0] * there
    y = part.sum(1) + 0.3 * far.sum(1) + 0.2 * torch.randn(number, generator=source)
    y = (y - y.mean()) / y.std()
    return split((kind, there, bond > 0, y), 500, 1000)


class GraphAttention(nn.Module):
    """Each atom takes a weighted mean of its neighbours and itself; the weights come from both (GATv2)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.mine, self.theirs = nn.Linear(width, width), nn.Linear(width, width)
        self.score = nn.Parameter(0.3 * torch.randn(heads, width // heads))
        self.out, self.norm = nn.Linear(2 * width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor, linked: Tensor) -> Tensor:
        mine, theirs = (layer(x).unflatten(2, (self.heads, -1)) for layer in (self.mine, self.theirs))
        pairs = F.leaky_relu(mine[:, :, None] + theirs[:, None, :], 0.2)
        score = (pairs * self.score).sum(4).masked_fill(~linked[:, :, :, None], -1e9)
        heard = torch.einsum("nijh,njhd->nihd", score.softmax(2), theirs).flatten(2)
        total = linked.sum(2, keepdim=True) * heard
        return self.norm(x + F.elu(self.out(torch.cat([heard, total / 4], 2))))


class MoleculeNet(nn.Module):
    """Vectors of atoms, two rounds of attention, a sum over atoms."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.atoms = nn.Embedding(KINDS, width)
        self.rounds = nn.ModuleList(GraphAttention(width, 4) for _ in range(2))
        self.part = nn.Sequential(nn.Linear(width, width), nn.ELU(), nn.Linear(width, 1))

    def forward(self, kind: Tensor, there: Tensor, bond: Tensor) -> Tensor:
        linked = bond | torch.eye(kind.shape[1], dtype=torch.bool)
        x = self.atoms(kind)
        for each in self.rounds:
            x = each(x, linked)
        return (self.part(x)[:, :, 0] * there).sum(1) / 4


@suite_task("regression", "squared error", "lower", steps=400, batch_size=32, sealed=True)
def graph_attention() -> Setup:
    """A property of molecules of 6 to 12 atoms."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.mse_loss(model(*batch[:3]), batch[3])

    splits = molecules()
    chance = error_of_mean(splits.train[3], splits.test[3])
    return Setup(MoleculeNet(), splits, loss, lambda net, data: loss(net, data).item(), chance)


TASKS = (graph_attention,)
