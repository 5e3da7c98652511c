"""A large batch is taken in groups of samples: the same step as if each group were one sample with several places."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from step_runs import Residual
from torch import Tensor, nn

from ddpnopt import DDPNOpt, _step
from ddpnopt.ddp.value import ScaleFree
from ddpnopt.trace import arrangement


@pytest.fixture(autouse=True)
def _few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrangement, "MOST", 8)


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


def without_biases() -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 7, bias=False), nn.Tanh(), nn.Linear(7, 6, bias=False), nn.Tanh(), nn.Linear(6, 3, bias=False)
    )


@pytest.mark.parametrize(("samples", "size"), [(9, 2), (13, 2), (17, 3), (31, 4), (1031, 129)])
def test_a_last_group_has_the_samples_that_are_left_over(samples: int, size: int) -> None:
    """As if it were filled up with inputs that are zero, at which a network without biases has no activations."""
    found = []
    missing = -samples % size
    for filled in (False, True):
        torch.manual_seed(0)
        model = without_biases()
        opt = DDPNOpt(model)
        for _ in range(4):
            x, y = torch.randn(samples, 5), torch.randint(3, (samples,))
            opt.zero_grad()
            if filled:
                places = torch.cat([x, x.new_zeros(missing, 5)]).view(-1, size, 5)
                loss = F.cross_entropy(model(places).flatten(0, 1)[:samples], y)
            else:
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            opt.step(loss=loss)
            assert opt.report.loss == "cross_entropy"
        found.append(model)
    for a, b in zip(found[0].parameters(), found[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("samples", [7, 8])
def test_small_batches_are_not_grouped(samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    usual, _ = trained(Residual, samples, None)
    monkeypatch.setattr(arrangement, "MOST", 1000)
    exact, _ = trained(Residual, samples, None)
    for a, b in zip(usual.parameters(), exact.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("samples", [24, 25, 29, 31])
def test_the_joint_system_has_no_more_rows_than_it_may(samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    factor = ScaleFree._factor

    def count(self: ScaleFree, A: Tensor) -> Tensor:
        rows.append(A.shape[-1])
        return factor(self, A)

    monkeypatch.setattr(ScaleFree, "_factor", count)
    trained(chain, samples, None)
    assert set(rows) == {-(-samples // -(-samples // 8))}
    assert max(rows) <= 8


def micro_batches(sizes: tuple[int, ...], order: list[int] | None = None) -> nn.Module:
    """Three steps on the same samples, in the order given."""
    torch.manual_seed(0)
    x, y = torch.randn(24, 5), torch.randint(3, (24,))
    model = Residual()
    opt = DDPNOpt(model)
    x, y = (x, y) if order is None else (x[order], y[order])
    for _ in range(3):
        opt.zero_grad()
        for some, labels in zip(x.split(sizes), y.split(sizes), strict=True):
            (F.cross_entropy(model(some), labels) * (len(some) / 24)).backward()
        opt.step()
    return model


@pytest.mark.parametrize("sizes", [(12, 12), (12, 6, 6), (9, 15), (21, 3)])
def test_micro_batches_give_the_step_of_the_whole_batch(sizes: tuple[int, ...]) -> None:
    for a, b in zip(micro_batches(sizes).parameters(), micro_batches((24,)).parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_micro_batches_with_samples_left_over_give_the_same_step_in_any_order() -> None:
    order = [*range(10, 17), *range(10), *range(17, 24)]
    for a, b in zip(micro_batches((10, 7, 7)).parameters(), micro_batches((7, 10, 7), order).parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("samples", [24, 29])
def test_a_repeated_step_recomputes_the_gradients_of_groups(samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that are made again with the same length are the same."""
    once, _ = trained(Loose, samples, None)
    accept, calls = _step.accept_length, []

    def refuse_first(*args: Any) -> float:
        calls.append(args)
        return 1 - 1e-13 if len(calls) % 2 else accept(*args)

    monkeypatch.setattr(_step, "accept_length", refuse_first)
    again, opt = trained(Loose, samples, None)
    assert opt.report.shortened == 4
    for a, b in zip(once.parameters(), again.parameters(), strict=True):
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


@pytest.mark.parametrize("samples", [24, 29])
@pytest.mark.parametrize("loss", ["cross_entropy", "squared_error", "contrastive"])
def test_pictures_norms_embeddings_and_coupled_losses_train_in_groups(loss: str, samples: int) -> None:
    torch.manual_seed(0)
    model = Pictures()
    x, kind, y = torch.randn(samples, 1, 4, 4), torch.randint(6, (samples,)), torch.randint(3, (samples,))
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
            same = (y[:, None] == y).to(z) - torch.eye(samples)
            value = -(torch.log_softmax(5 * z @ z.T - 1e3 * torch.eye(samples), 1) * same).sum(1).mean()
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


@pytest.mark.parametrize("samples", [24, 29])
@pytest.mark.parametrize("mixing", [False, True])
def test_layers_that_mix_the_samples_are_found_in_groups(mixing: bool, samples: int) -> None:
    model = Graph(mixing=mixing)
    opt = DDPNOpt(model)
    F.cross_entropy(model(torch.randn(samples, 5)), torch.randint(3, (samples,))).backward()
    opt.step()
    assert list(opt._chains.values()) == [not mixing]
