"""A part of the loss that is computed from activations inside the model, which its outputs do not show."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from optimizer_networks import fcn, same, vectors
from torch import Tensor, nn

from ddpnopt import DDPNOpt


class Sparse(nn.Module):
    """Keeps its activations for a penalty."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 12), nn.Linear(12, 12), nn.Linear(12, 3)
        self.kept = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        self.kept = torch.relu(self.b(torch.relu(self.a(x))))
        found: Tensor = self.c(self.kept)
        return found


def decrease(model: Sparse, opt: torch.optim.Optimizer, size: float) -> float:
    """Of the whole loss, in 40 steps on four batches."""
    losses = []
    for k in range(44):
        x, y = vectors(16, seed=k % 4)
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y) + size * model.kept.square().mean()
        losses.append(float(loss.detach()))
        loss.backward()
        opt.step()
    return sum(losses[:4]) / 4 - sum(losses[-4:]) / 4


@pytest.mark.parametrize("size", [1.0, 100.0])
def test_a_penalty_on_activations_is_reduced_with_the_rest_of_the_loss(size: float) -> None:
    torch.manual_seed(0)
    model = Sparse()
    other = copy.deepcopy(model)
    ours = decrease(model, opt := DDPNOpt(model), size)
    assert ours > 0.9 * decrease(other, torch.optim.AdamW(other.parameters(), lr=3e-3), size)
    assert opt.report.loss == "cross_entropy"


def test_an_attempt_that_is_repeated_keeps_the_gradient_of_the_penalty() -> None:
    """Two attempts that change too much, and the next one, are those of a step with that length from the start."""
    torch.manual_seed(0)
    models = [Sparse(), Sparse()]
    models[1].load_state_dict(models[0].state_dict())
    updates = []
    for model, first in zip(models, (1e3, 1.0), strict=True):
        opt = DDPNOpt(model)
        opt.param_groups[0]["lr"] = first
        x, y = vectors(16)
        old = [p.detach().clone() for p in model.parameters()]
        (F.cross_entropy(model(x), y) + 10 * model.kept.square().mean()).backward()
        opt.step()
        updates.append(torch.cat([(p.detach() - q).flatten() for p, q in zip(model.parameters(), old, strict=True)]))
        assert opt.report.shortened == (first > 1)
    assert float(F.cosine_similarity(*updates, dim=0)) > 0.9


def test_the_loss_of_another_model_is_not_taken_for_one() -> None:
    torch.manual_seed(0)
    model, other = fcn(), nn.Linear(5, 1)
    alone = copy.deepcopy(model)
    with_other, by_itself = DDPNOpt(model), DDPNOpt(alone)
    for k in range(3):
        x, y = vectors(seed=k)
        for net, opt in ((model, with_other), (alone, by_itself)):
            opt.zero_grad()
            loss = F.cross_entropy(net(x), y)
            (loss + 5 + other(x).square().mean() if net is model else loss).backward()
            opt.step()
    assert same(model, alone)
