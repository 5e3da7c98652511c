"""Norms, embeddings and layers that run several times: one step against the dense reference, by name.

For a batch norm, which couples the samples, the gradient of sample i is that of the whole batch loss at the places of
sample i: this is what the reference computes from the gradients at the outputs of the layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hostile_reference import Settings, reference_step
from torch import Tensor, nn

import ddpnopt.ddp.value.damping
from ddpnopt import DDPNOpt

B = 4


@pytest.fixture(autouse=True)
def _float64() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)


class Siamese(nn.Module):
    """One encoder and one norm on both halves of the input, and a cell that runs three times."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.norm, self.cell, self.out = nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        a, b = (torch.tanh(self.norm(self.encode(half))) for half in x.chunk(2, 1))
        for _ in range(3):
            a = torch.tanh(self.cell(a))
        return self.out(torch.cat([a, b], 1))


class Words(nn.Module):
    """One table of rows, with padding, for two features of different length, and another table."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.more = nn.Embedding(6, 4, padding_idx=0), nn.Embedding(6, 4)
        self.norm, self.out = nn.RMSNorm(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        both = self.rows(x[:, :3]).mean(1) + self.rows(x[:, 3]) + self.more(x).sum(1)
        return self.out(torch.tanh(self.norm(both)))


class Residual(nn.Module):
    """A block of a convolutional network, with a batch norm in each branch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1), nn.Linear(4, 3)
        self.one, self.two, self.three = nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.one(self.a(x)))
        x = torch.relu(x + self.three(self.two(self.b(x))))
        return self.out(x.mean((2, 3)))


def vectors() -> Tensor:
    return torch.randn(B, 6)


def ids() -> Tensor:
    return torch.randint(0, 6, (B, 4))


def images() -> Tensor:
    return torch.randn(B, 1, 3, 3)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "layer norm": (lambda: nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3)), vectors),
    "layer norm of images": (
        lambda: nn.Sequential(nn.Conv2d(1, 2, 2), nn.LayerNorm((2, 2, 2)), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)),
        images,
    ),
    "layer norm without shift": (
        lambda: nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5, bias=False), nn.Tanh(), nn.Linear(5, 3)),
        vectors,
    ),
    "norm first": (lambda: nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), vectors),
    "norm last": (lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3), nn.LayerNorm(3)), vectors),
    "group norm": (
        lambda: nn.Sequential(nn.Conv2d(1, 4, 2), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)),
        images,
    ),
    "batch norm": (lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)), vectors),
    "batch norm of images": (Residual, images),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(6, 3), nn.Tanh(), nn.Linear(3, 2), nn.Flatten(), nn.Linear(8, 3)),
        ids,
    ),
    "two embeddings, padding, used twice": (Words, ids),
    "used several times": (Siamese, vectors),
}


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["identity", "rmsprop", "adam"])
@pytest.mark.parametrize("value", ["batch", "outer"])
@pytest.mark.parametrize("name", NETWORKS)
def test_one_step_equals_the_dense_reference(name: str, value: str, kind: str, weight_decay: float) -> None:
    make, inputs = NETWORKS[name]
    model, x = make(), inputs()
    y = torch.arange(B) % 3
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)  # no symmetry
    if isinstance(model, Words):
        model.rows.weight.data[0] = 0.0  # as PyTorch has it: then there is nothing to decay
    s = Settings(value, "sqrt", kind, 0.5 if kind == "identity" else 1e-3, relax=0.3, weight_decay=weight_decay)
    form: dict[str, Any] = {"relax": s.relax, "dof": 1.0} if value == "batch" else {}
    opt = DDPNOpt(
        model, s.lr, value=value, terminal="sqrt", curvature=kind, weight_decay=weight_decay, diagnostics=True, **form
    )
    wanted, before = copy.deepcopy(model), copy.deepcopy(model)
    rng = torch.get_rng_state()
    F.cross_entropy(model(x), y).backward()
    with patch.object(ddpnopt.ddp.value.damping, "FLOOR", 0.0):
        opt.step()
    assert opt.report.open_loop == []
    assert not opt.report.shortened
    reference_step(wanted, x, rng, lambda z: F.cross_entropy(z, y, reduction="none") / B, s)
    for (parameter, p), q, old in zip(model.named_parameters(), wanted.parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-9, msg=lambda m, n=parameter: f"{n}: {m}")
        assert not torch.equal(p, old)
