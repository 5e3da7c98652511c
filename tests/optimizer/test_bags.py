"""`nn.EmbeddingBag` run in pieces computes the same, and its rows have the gradients of the samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt import DDPNOpt
from ddpnopt._collect import one_recording
from ddpnopt.trace.fused import Interception
from ddpnopt.trace.model_layers import fuse

IDS = torch.tensor([3, 1, 1, 0, 6, 2, 2, 5, 0, 4, 3, 3])
STARTS = torch.tensor([0, 3, 3, 4, 9])  # the second bag is empty
FACTORS = torch.linspace(-1, 2, 12)
INPUTS: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "mean": ({"mode": "mean"}, (IDS, STARTS)),
    "sum": ({"mode": "sum"}, (IDS, STARTS)),
    "end": ({"mode": "mean", "include_last_offset": True}, (IDS, F.pad(STARTS, (0, 1), value=12))),
    "padding": ({"mode": "mean", "padding_idx": 3}, (IDS, STARTS)),
    "factors": ({"mode": "sum"}, (IDS, STARTS, FACTORS)),
    "equal": ({"mode": "mean", "padding_idx": 0}, (IDS[:10].view(5, 2),)),
}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)


class Words(nn.Module):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.bag, self.a, self.b = nn.EmbeddingBag(7, 4, **options), nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, ids: Tensor, starts: Tensor | None = None, factors: Tensor | None = None) -> Tensor:
        factors = factors if factors is None else factors.to(self.a.weight)
        out: Tensor = self.b(torch.tanh(self.a(self.bag(ids, starts, factors))))
        return out


@pytest.mark.parametrize("name", INPUTS)
def test_the_pieces_compute_what_the_module_computes(name: str) -> None:
    options, inputs = INPUTS[name]
    bag = nn.EmbeddingBag(7, 4, **options)
    fused = fuse("bag", bag)
    assert fused is not None
    inputs = tuple(t.to(bag.weight) if t.is_floating_point() else t for t in inputs)
    wanted = bag(*inputs)
    with Interception(fused.replacements(inputs)):
        found = bag(*inputs)
    torch.testing.assert_close(found, wanted)
    v = torch.randn_like(wanted)
    torch.testing.assert_close(torch.autograd.grad(found, bag.weight, v), torch.autograd.grad(wanted, bag.weight, v))


@pytest.mark.parametrize("name", INPUTS)
def test_the_gradient_of_each_bag_is_that_of_autograd(name: str) -> None:
    options, inputs = INPUTS[name]
    model, y = Words(options), torch.arange(5) % 3
    parameters = list(model.parameters())
    losses = F.cross_entropy(model(*inputs), y, reduction="none") / 5
    wanted = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses]
    opt = DDPNOpt(model)
    F.cross_entropy(model(*inputs), y).backward()
    with torch.no_grad():
        recording, _ = one_recording(opt)
    assert recording is not None
    assert [record.name for record in recording.layers] == ["bag.words", "a", "b"]
    for i, expected in enumerate(wanted):
        found = [
            part
            for record in recording.layers
            if record.p_h is not None
            for part in record.layer.grad(record.x[i : i + 1], record.p_h[i : i + 1])
        ]
        for part, g in zip(found, expected, strict=True):
            torch.testing.assert_close(part, g, rtol=1e-9, atol=1e-12)


def test_a_bag_of_maxima_is_left_to_the_base_optimizer() -> None:
    assert fuse("bag", nn.EmbeddingBag(7, 4, mode="max")) is None
