"""A large batch is taken in groups of samples: the same step as if each group were one sample with several places."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt import DDPNOpt, _step
from ddpnopt.trace import arrangement


@pytest.fixture(autouse=True)
def _few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrangement, "MOST", 8)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inside, self.norm, self.out = (
            nn.Linear(5, 7),
            nn.Linear(7, 7),
            nn.LayerNorm(7),
            nn.Linear(7, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.out(self.norm(h + torch.tanh(self.inside(h))))


class Loose(nn.Module):
    """Parameters that belong to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(5, 7), nn.Linear(7, 3)
        self.scale, self.shift = nn.Parameter(torch.randn(7)), nn.Parameter(torch.randn(7))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.scale * self.first(x) + self.shift))


def chain() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3))


def trained(make: type[nn.Module], samples: int, groups: int | None) -> tuple[nn.Module, DDPNOpt]:
    """Four steps on flat batches, or on batches of groups as samples."""
    torch.manual_seed(0)
    model = make()
    opt = DDPNOpt(model)
    for _ in range(4):
        x, y = torch.randn(samples, 5), torch.randint(3, (samples,))
        opt.zero_grad()
        if groups is None:
            loss = F.cross_entropy(model(x), y)
        else:
            loss = F.cross_entropy(model(x.view(groups, -1, 5)).flatten(0, 1), y)
        loss.backward()
        opt.step()
    return model, opt


@pytest.mark.parametrize("make", [chain, Residual, Loose], ids=["chain", "residual", "loose parameters"])
@pytest.mark.parametrize(("samples", "groups"), [(16, 8), (24, 8), (10, 5), (28, 7)])
def test_a_large_batch_is_one_of_groups_as_samples(make: type[nn.Module], samples: int, groups: int) -> None:
    flat, opt = trained(make, samples, None)
    grouped, _ = trained(make, samples, groups)
    assert opt.report.loss == "cross_entropy"
    for a, b in zip(flat.parameters(), grouped.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("samples", [7, 8, 13])
def test_small_batches_and_prime_numbers_of_samples_are_not_grouped(
    samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, _ = trained(Residual, samples, None)
    monkeypatch.setattr(arrangement, "MOST", 1000)
    exact, _ = trained(Residual, samples, None)
    for a, b in zip(usual.parameters(), exact.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("sizes", [(12, 12), (12, 6, 6), (10, 7, 7)], ids=["equal", "unequal", "without a divisor"])
def test_micro_batches_give_the_step_of_the_whole_batch(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = torch.randn(24, 5), torch.randint(3, (24,))
    found = []
    for parts in (sizes, (24,)):
        if sizes == (10, 7, 7) and parts != sizes:  # micro-batches that have no groups of one size are not grouped
            monkeypatch.setattr(arrangement, "MOST", 1000)
        torch.manual_seed(0)
        model = Residual()
        opt = DDPNOpt(model)
        for _ in range(3):
            opt.zero_grad()
            for some, labels in zip(x.split(parts), y.split(parts), strict=True):
                (F.cross_entropy(model(some), labels) * (len(some) / 24)).backward()
            opt.step()
        found.append(model)
    for a, b in zip(found[0].parameters(), found[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_a_repeated_step_recomputes_the_gradients_of_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that are refused once, and made again with a quarter of the length."""
    accept, calls = _step.accept_length, []

    def refuse_first(*args: Any) -> float:
        calls.append(args)
        return 0.25 if len(calls) % 2 else accept(*args)

    monkeypatch.setattr(_step, "accept_length", refuse_first)
    flat, opt = trained(Loose, 24, None)
    assert opt.report.shortened == 4
    grouped, _ = trained(Loose, 24, 8)
    for a, b in zip(flat.parameters(), grouped.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


class Pictures(nn.Module):
    """Convolutions, norms over the batch and an embedding of a second input."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()
        )
        self.kinds, self.out = nn.Embedding(6, 64), nn.Linear(64, 3)

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        return self.out(self.body(x).flatten(1)[:, :64] + self.kinds(kind))


@pytest.mark.parametrize("loss", ["cross_entropy", "squared_error", "contrastive"])
def test_pictures_norms_embeddings_and_coupled_losses_train_in_groups(loss: str) -> None:
    torch.manual_seed(0)
    model = Pictures()
    x, kind, y = torch.randn(24, 1, 4, 4), torch.randint(6, (24,)), torch.randint(3, (24,))
    opt = DDPNOpt(model)
    losses = []
    for _ in range(40):
        opt.zero_grad()
        z = model(x, kind)
        if loss == "cross_entropy":
            value = F.cross_entropy(z, y)
        elif loss == "squared_error":
            value = F.mse_loss(z, F.one_hot(y, 3).to(z))
        else:
            z = F.normalize(z, dim=1)
            same = (y[:, None] == y).to(z) - torch.eye(24)
            value = -(torch.log_softmax(5 * z @ z.T - 1e3 * torch.eye(24), 1) * same).sum(1).mean()
        value.backward()
        opt.step()
        losses.append(float(value.detach()))
    assert losses[-1] < (0.7 if loss == "contrastive" else 0.2) * losses[0]
    assert not opt.report.undone


class Graph(nn.Module):
    """The nodes of one graph as samples: each layer reads the mean of all of them, too."""

    def __init__(self, *, mixing: bool) -> None:
        super().__init__()
        self.first, self.out, self.mixing = nn.Linear(5, 7), nn.Linear(7, 3), mixing

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.out(h + h.mean(0) if self.mixing else h)


@pytest.mark.parametrize("mixing", [False, True])
def test_layers_that_mix_the_samples_are_found_in_groups(mixing: bool) -> None:
    model = Graph(mixing=mixing)
    opt = DDPNOpt(model)
    F.cross_entropy(model(torch.randn(24, 5)), torch.randint(3, (24,))).backward()
    opt.step()
    assert list(opt._chains.values()) == [not mixing]
