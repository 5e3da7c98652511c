"""Values that are the same for all samples, among layers that do not have the samples in dimension 0."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt import DDPNOpt, OpenLoopWarning


class Queries(nn.Module):
    """Queries attend to each other and to a sequence, as in DETR, with the samples in dimension 1 or 0."""

    def __init__(self, *, time_first: bool) -> None:
        super().__init__()
        self.time_first = time_first
        self.into = nn.Linear(6, 8)
        self.queries = nn.Buffer(torch.randn(3, 8))
        self.decode = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=not time_first)
        self.out = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.into(x)
        if self.time_first:
            return self.out(self.decode(self.queries[:, None].repeat(1, x.shape[1], 1), seen)).transpose(0, 1)
        return self.out(self.decode(self.queries.repeat(len(x), 1, 1), seen))


def test_queries_repeated_for_each_sample_take_part_in_a_sequence_first_model() -> None:
    plain = Queries(time_first=False)
    other = Queries(time_first=True)
    other.load_state_dict(plain.state_dict())
    x, y = torch.randn(7, 5, 6), torch.randn(7, 3, 2)
    for model in (plain, other):
        opt = DDPNOpt(model)
        for _ in range(3):
            opt.zero_grad()
            F.mse_loss(model(x.transpose(0, 1) if model.time_first else x), y).backward()
            opt.step()
        assert opt.report.open_loop == []
    for p, q in zip(plain.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-8, atol=1e-10)


class Choices(nn.Module):
    """Scores of several choices, which are rows of dimension 0 inside, with a table and a shift that all rows share."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.kinds, self.body = nn.Embedding(9, 6), nn.Embedding(2, 6), nn.Linear(6, 6)
        self.table, self.shift, self.out = nn.Embedding(4, 6), nn.Parameter(torch.randn(6)), nn.Linear(6, 1)
        self.flat = True

    def forward(self, ids: Tensor) -> Tensor:  # (B, choices, length)
        inner = ids.flatten(0, 1) if self.flat else ids
        h = self.words(inner) + self.kinds(torch.zeros_like(inner)) + self.table(torch.arange(ids.shape[2])[None])
        h = torch.tanh(self.body(h) + self.shift).mean(-2)
        return self.out(h).view(ids.shape[:2])


def test_parameters_that_meet_the_choices_of_a_sample_take_part() -> None:
    model = Choices()
    twin = copy.deepcopy(model)
    twin.flat = False
    ids = torch.randint(9, (5, 3, 4))
    for net in (model, twin):
        opt = DDPNOpt(net)
        for _ in range(3):
            opt.zero_grad()
            F.cross_entropy(net(ids), torch.arange(5) % 3).backward()
            opt.step()
        assert opt.report.open_loop == []
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-7, atol=1e-9, msg=name)


def test_a_part_of_an_in_projection_that_is_left_has_the_gradient_of_autograd() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.out = nn.Linear(6, 8), nn.Linear(8, 2)
            self.read = nn.MultiheadAttention(8, 2)

        def forward(self, x: Tensor) -> Tensor:  # (T, B, 6); the first queries are mixed over the samples
            seen = self.into(x)
            mixed = seen[:2].flip(1) + seen[:2].mean(1, keepdim=True)
            return self.out(self.read(mixed, seen, seen)[0]).transpose(0, 1)

    model = Model()
    twin = copy.deepcopy(model)
    x, y = torch.randn(5, 7, 6), torch.randn(7, 2, 2)
    opt = DDPNOpt(model)
    F.mse_loss(model(x), y).backward()
    with pytest.warns(OpenLoopWarning, match="in_proj"):
        opt.step()
    F.mse_loss(twin(x), y).backward()
    assert model.read.in_proj_weight.grad is not None
    torch.testing.assert_close(model.read.in_proj_weight.grad, twin.read.in_proj_weight.grad)


def test_a_step_that_is_made_again_has_the_same_gradients_of_parameters_that_meet_the_choices() -> None:
    model, ids = Choices(), torch.randint(9, (5, 3, 4))
    opt = DDPNOpt(model)
    F.cross_entropy(model(ids), torch.arange(5) % 3).backward()
    (recording,) = opt._capture.arrivals.take_all()
    before = {record.name: record.p_h for record in recording.layers}
    assert {"shift", "table"} <= set(before)
    for record in recording.layers:
        record.free()
    opt._capture.retrace(recording)
    for record in recording.layers:
        torch.testing.assert_close(record.p_h, before[record.name])
