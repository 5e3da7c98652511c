"""Which tensors have the samples, where parameters belong to no layer: told by the inputs, not by sizes alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt import DDPNOpt, OpenLoopWarning

B = 6


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)


def train(opt: DDPNOpt, loss_of: Callable[[], Tensor], steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        opt.zero_grad()
        loss = loss_of()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


class Masked(nn.Linear):
    """A masked layer with as many outputs as there are samples; the mask is a buffer, or an attribute."""

    def __init__(self, inputs: int, kind: str) -> None:
        super().__init__(inputs, B)
        mask = torch.ones(B, inputs).tril()
        self.kind = kind
        if kind == "attribute":
            self.mask = mask
        else:
            self.register_buffer("mask", mask.T.contiguous() if kind == "transposed" else mask)

    def forward(self, x: Tensor) -> Tensor:
        mask = self.mask.T[:B] if self.kind == "transposed" else self.mask
        return F.linear(x, self.weight * mask, self.bias)


@pytest.mark.parametrize("kind", ["buffer", "attribute", "transposed"])
def test_a_mask_with_as_many_rows_as_the_batch_is_not_taken_for_samples(kind: str) -> None:
    model = nn.Sequential(Masked(B, kind), nn.Tanh(), nn.Linear(B, 3))
    x, y = torch.randn(B, B), torch.arange(B) % 3
    wanted = []
    for i in range(B):
        model.zero_grad()
        (F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]) / B).backward()
        wanted.append(model[0].weight.grad.flatten().clone())
    model.zero_grad()
    opt = DDPNOpt(model)
    F.cross_entropy(model(x), y).backward()
    (recording,) = opt._capture.arrivals.take_all()
    found = {record.name: record.p_h for record in recording.layers}
    torch.testing.assert_close(found["0.weight"], torch.stack(wanted))


class Blobs(nn.Module):
    """Parameters alone: there is no input, and so there are no samples."""

    def __init__(self) -> None:
        super().__init__()
        self.at, self.height = nn.Parameter(torch.rand(5)), nn.Parameter(torch.full((5,), 0.1))

    def forward(self) -> Tensor:
        x = torch.linspace(0, 1, 16)[None]
        return (self.height[:, None] * torch.exp(-30 * (x - self.at[:, None]).square())).sum(0)


def test_a_model_without_inputs_is_trained_without_feedback_and_says_so() -> None:
    model, wanted = Blobs(), torch.sin(3 * torch.linspace(0, 1, 16))
    opt = DDPNOpt(model)
    with pytest.warns(OpenLoopWarning, match="at, height"):
        losses = train(opt, lambda: F.mse_loss(model(), wanted), 150)
    assert losses[-1] < 0.05 * losses[0]
    assert opt.report.open_loop == ["at", "height"]


class Regression(nn.Module):
    """Bare parameters, and the loss inside the model."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.zeros(4, 1)), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x @ self.w + self.b - y).square().mean()


def test_bare_parameters_in_a_model_that_returns_its_loss_are_trained_with_feedback() -> None:
    x = torch.randn(32, 4)
    y = x @ torch.randn(4, 1) + 2
    model = Regression()
    opt = DDPNOpt(model)
    losses = train(opt, lambda: model(x, y), 60)
    assert losses[-1] < 1e-3 * losses[0]
    assert opt.report.open_loop == []


class Shifted(nn.Embedding):
    """A table of positions with a forward of its own, which counts them for each sample."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(torch.arange(ids.shape[1]).expand(len(ids), -1) + 2)


class Scaled(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 3


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.out = Scaled(7, 4, padding_idx=1), Shifted(9, 4), nn.Linear(4, 7)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.out(torch.tanh(self.words(ids) + self.places(ids)))
        return found


def test_embeddings_with_a_forward_of_their_own_get_feedback() -> None:
    model, ids = Words(), torch.randint(7, (B, 5))
    y = torch.randint(7, (B, 5))
    wanted: dict[str, list[Tensor]] = {"words.weight": [], "places.weight": []}
    for i in range(B):
        model.zero_grad()
        (F.cross_entropy(model(ids[i : i + 1]).flatten(0, 1), y[i]) / B).backward()
        for name, found in wanted.items():
            found.append(model.get_parameter(name).grad.flatten().clone())  # type: ignore[union-attr]
    model.zero_grad()
    opt = DDPNOpt(model)
    F.cross_entropy(model(ids).flatten(0, 1), y.flatten()).backward()
    (recording,) = opt._capture.arrivals.take_all()
    records = {record.name: record.p_h for record in recording.layers}
    for name, each in wanted.items():
        torch.testing.assert_close(records[name], torch.stack(each))


class Table(nn.Module):
    """A bare table whose rows are chosen by labels, counted from the front or from the back."""

    def __init__(self, back: bool) -> None:
        super().__init__()
        self.table, self.out, self.back = nn.Parameter(torch.randn(5, 4)), nn.Linear(7, 3), back

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        found: Tensor = self.out(torch.cat([x, torch.tanh(self.table[labels - 5 if self.back else labels])], 1))
        return found


@pytest.mark.parametrize("back", [False, True])
def test_rows_of_a_bare_table_that_samples_choose_have_their_gradients(back: bool) -> None:
    model = Table(back)
    x, labels, y = torch.randn(B, 3), torch.tensor([0, 3, 3, 1, 0, 4]), torch.arange(B) % 3
    wanted = []
    for i in range(B):
        model.zero_grad()
        (F.cross_entropy(model(x[i : i + 1], labels[i : i + 1]), y[i : i + 1]) / B).backward()
        assert model.table.grad is not None
        wanted.append(model.table.grad.flatten().clone())
    model.zero_grad()
    opt = DDPNOpt(model)
    F.cross_entropy(model(x, labels), y).backward()
    (recording,) = opt._capture.arrivals.take_all()
    found = {record.name: record.p_h for record in recording.layers}
    torch.testing.assert_close(found["table"], torch.stack(wanted))


class Regularised(nn.Module):
    """Adds a penalty on a bare weight to the loss that it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high, self.out = (
            nn.Parameter(torch.randn(2, 4)),
            nn.Parameter(torch.randn(4, 2)),
            nn.Linear(4, 3),
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(self.out(x + torch.tanh(x @ self.low.T) @ self.high.T), y)
        loss += 0.1 * (self.low @ self.low.T - torch.eye(2)).square().sum()
        return loss


@pytest.mark.filterwarnings("error::ddpnopt.OpenLoopWarning")
def test_a_penalty_that_the_model_adds_to_its_loss_does_not_hide_the_samples() -> None:
    model = Regularised()
    x, y = torch.randn(B, 4), torch.arange(B) % 3
    opt = DDPNOpt(model)
    first = last = 0.0
    for step in range(30):
        opt.zero_grad()
        loss = model(x, y)
        loss.backward()
        opt.step()
        assert opt.report.open_loop == []
        first, last = loss.item() if step == 0 else first, loss.item()
    assert last < 0.6 * first
