"""Recurrent modules on packed sequences: run as pieces on padded ones they are the same, and all weights take part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fused_networks import PAIRS, N, Recurs, core, sequences
from optimizer_networks import check_sample_gradients
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from ddpnopt import DDPNOpt
from ddpnopt.trace.fused import Interception
from ddpnopt.trace.model_layers import fuse

tight = {"rtol": 1e-9, "atol": 1e-9}
LENGTHS = torch.tensor([2, 4, 1, 4, 3])


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)


def packed(x: Tensor, lengths: Tensor = LENGTHS, **options: Any) -> PackedSequence:
    return pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False, **options)


class Packed(Recurs):
    """Reads the last states, and the outputs in the order of the batch."""

    lengths: Tensor | None = LENGTHS

    def run(self, x: Tensor) -> Tensor:
        lengths = torch.full((len(x),), x.shape[1]) if self.lengths is None else self.lengths
        found, states = self.recurrent(packed(x, lengths))
        states = sum(states, 0 * states[0]) if isinstance(states, tuple) else states
        padded: Tensor = pad_packed_sequence(found, batch_first=True, total_length=x.shape[1])[0]
        if self.lengths is None:
            return padded
        return padded + states[-1, :, None].repeat(1, 1, self.directions)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN, lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k)])
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"num_layers": 2, "bidirectional": True, "dropout": 0.3}])
@pytest.mark.parametrize("in_order", [True, False])
def test_the_pieces_compute_what_the_module_computes(kind: Any, options: dict[str, Any], in_order: bool) -> None:
    module = kind(N, 6, batch_first=True, **options)
    fused = fuse("module", module)
    assert fused is not None
    x = torch.randn(5, 4, N, requires_grad=True)
    h0 = torch.randn(options.get("num_layers", 1) * (2 if "bidirectional" in options else 1), 5, 6, requires_grad=True)
    lengths = LENGTHS.sort(descending=True).values if in_order else LENGTHS
    results = []
    for replaced in (False, True):
        torch.manual_seed(1)
        hx = (h0, 0.5 * h0) if isinstance(module, nn.LSTM) else h0
        given = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=in_order), hx
        if replaced:
            with Interception(fused.replacements(given)):
                out, states = module(*given)
        else:
            out, states = module(*given)
        found = [out.data, *(states if isinstance(states, tuple) else (states,))]
        weighted = [(o * torch.randn(o.shape, generator=torch.Generator().manual_seed(2))).sum() for o in found]
        gradients = torch.autograd.grad(torch.stack(weighted).sum(), [x, h0, *module.parameters()])
        results.append(([o.detach() for o in found], gradients, torch.rand(())))
    torch.testing.assert_close(*results, **tight)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("directions", [1, 2])
def test_the_gradient_of_each_sample_is_that_of_autograd(kind: str, directions: int) -> None:
    model = Packed(kind, 2, directions)
    x, y = sequences()
    check_sample_gradients(model, x, y)


@pytest.mark.parametrize("pair", ["LSTM, deep", "GRU", "RNN, deep"])
def test_with_equal_lengths_the_steps_are_those_without_packing(pair: str) -> None:
    plain, _ = PAIRS[pair]()
    assert isinstance(plain, Recurs)
    model = Packed(plain.kind, plain.layers, plain.directions)
    model.lengths = None
    model.load_state_dict(plain.state_dict())
    for each in (plain, model):
        opt = DDPNOpt(each)
        for seed in range(3):
            x, y = sequences(seed=seed)
            opt.zero_grad()
            F.cross_entropy(each(x), y).backward()
            opt.step()
        assert opt.report.open_loop == []
    torch.testing.assert_close(core(model), core(plain), **tight)


def test_it_trains_without_parameters_that_have_no_feedback() -> None:
    model = Packed("LSTM", 2, 2)
    opt = DDPNOpt(model)
    x, y = sequences()
    losses = []
    for _ in range(20):
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    assert opt.report.open_loop == []
    assert losses[-1] < 0.3 * losses[0]
