"""Attention and recurrent modules: run as linear pieces they are the same, and they take the same steps."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fused_networks import PAIRS, Attends, Recurs, core, sequences
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from ddpnopt import DDPNOpt, OpenLoopWarning
from ddpnopt.trace.fused import Interception
from ddpnopt.trace.model_layers import fuse

tight = {"rtol": 1e-9, "atol": 1e-9}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)


# -- the pieces compute what the module computes ----------------------------------------------------------------------


def compare(module: nn.Module, *inputs: Tensor, **options: Any) -> None:
    """Outputs, their layout, random numbers and all gradients, of the module and of its pieces."""
    fused = fuse("module", module)
    assert fused is not None
    leaves = {id(x): x.clone().requires_grad_() for x in inputs}
    results = []
    for replaced in (False, True):
        torch.manual_seed(1)
        for p in (*module.parameters(), *leaves.values()):
            p.grad = None
        given = [leaves[id(x)] for x in inputs]
        if replaced:
            with Interception(fused.replacements(tuple(given))):
                found = module(*given, **options)
        else:
            found = module(*given, **options)
        out = [o for o in tree_leaves(found) if o is not None]
        drawn = torch.rand(())
        weighted = [o * torch.randn(o.shape, generator=torch.Generator().manual_seed(2)) for o in out]
        torch.stack([w.sum() for w in weighted]).sum().backward()
        grads = [p.grad for p in (*module.parameters(), *leaves.values())]
        results.append(([o.stride() for o in out], [o.detach() for o in out], drawn, grads))
    assert results[0][0] == results[1][0]
    torch.testing.assert_close(results[0][1:], results[1][1:], **tight)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("need_weights", [True, False])
def test_attention_in_pieces_is_attention(batch_first: bool, dropout: float, need_weights: bool) -> None:
    B, L, S = 3, 5, 4

    def tokens(n: int) -> Tensor:
        return torch.randn(B, n, 8) if batch_first else torch.randn(n, B, 8)

    attention = nn.MultiheadAttention(8, 2, dropout=dropout, batch_first=batch_first)
    x, y, z = tokens(L), tokens(S), tokens(S)
    causal, padding = torch.ones(L, L).triu(1).bool(), torch.rand(B, S) > 0.7
    padding[:, 0] = False
    each_head = torch.randn(2 * B, L, L)
    compare(attention, x, x, x, need_weights=need_weights)
    compare(attention, x, y, y, need_weights=need_weights, key_padding_mask=padding)
    compare(attention, x, y, z, need_weights=need_weights, average_attn_weights=False)
    compare(attention, x, x, x, need_weights=need_weights, attn_mask=causal, is_causal=True)
    compare(attention, x, x, x, need_weights=need_weights, attn_mask=each_head)
    separate = nn.MultiheadAttention(8, 2, dropout=dropout, batch_first=batch_first, kdim=3, vdim=6)
    compare(separate, x, y[..., :3].contiguous(), z[..., :6].contiguous(), need_weights=need_weights)
    compare(nn.MultiheadAttention(8, 2, bias=False, batch_first=batch_first), x, y, y)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN, lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k)])
@pytest.mark.parametrize(
    "options",
    [{}, {"bias": False}, {"num_layers": 2, "dropout": 0.4}, {"num_layers": 2, "bidirectional": True, "dropout": 0.2}],
)
@pytest.mark.parametrize("batch_first", [True, False])
def test_recurrent_layers_in_pieces_are_the_layers(kind: Any, options: dict[str, Any], batch_first: bool) -> None:
    module = kind(4, 5, batch_first=batch_first, **options)
    compare(module, torch.randn(6, 3, 4))
    compare(module, torch.randn(1, 3, 4))
    if not options and not isinstance(module, nn.LSTM):
        compare(module, torch.randn(6, 3, 4), torch.randn(1, 6 if batch_first else 3, 5))


def test_cells_in_pieces_are_the_cells() -> None:
    for cell in (
        nn.GRUCell(4, 5),
        nn.RNNCell(4, 5),
        nn.RNNCell(4, 5, nonlinearity="relu"),
        nn.GRUCell(4, 5, bias=False),
    ):
        compare(cell, torch.randn(6, 4), torch.randn(6, 5))
    compare(nn.LSTMCell(4, 5), torch.randn(6, 4))


# -- steps ------------------------------------------------------------------------------------------------------------


def train(model: nn.Module, opt: Any, steps: int = 3, **data: int) -> None:
    for seed in range(steps):
        x, y = sequences(seed=seed, **data)
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "with lr": {"lr": 3.0},
    "outer": {"value": "outer", "lr": 0.3},
    "adam": {"curvature": "adam", "lr": 0.05},
    "columns": {"terminal": "cross_entropy"},
    "decay": {"lr": 3.0, "weight_decay": 0.001},
    "weight_grads": {"weight_grads": True},
    "recompute": {"recompute": True},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("pair", PAIRS)
def test_steps_are_those_of_the_same_network_written_with_linear_layers(pair: str, options: str) -> None:
    fused, by_hand = PAIRS[pair]()
    a, b = DDPNOpt(fused, **OPTIONS[options]), DDPNOpt(by_hand, **OPTIONS[options])
    train(fused, a)
    train(by_hand, b)
    assert a.report.open_loop == []
    assert a.report.undone == b.report.undone < 3
    torch.testing.assert_close(core(fused), core(by_hand), **tight)


def accumulate(model: nn.Module, opt: Any, parts: list[slice]) -> None:
    x, y = sequences(6)
    for some in parts:
        (F.cross_entropy(model(x[some]), y[some], reduction="sum") / len(y)).backward()
    opt.step()


@pytest.mark.parametrize("make", [lambda: Attends("cross"), lambda: Recurs("LSTM", 2), lambda: Recurs("GRU", 1, 2)])
def test_micro_batches_are_one_batch(make: Any) -> None:
    a = make()
    b = copy.deepcopy(a)
    accumulate(a, DDPNOpt(a), [slice(0, 6)])
    accumulate(b, DDPNOpt(b), [slice(0, 4), slice(4, 6)])
    torch.testing.assert_close(core(a), core(b), **tight)


@pytest.mark.parametrize("make", [lambda: Attends("self"), lambda: Attends("cross"), lambda: Recurs("LSTM", 2)])
def test_a_repeated_attempt_starts_from_the_same_states(make: Any) -> None:
    """The retraced pass gives what was recorded."""
    model = make()
    opt = DDPNOpt(model)
    x, y = sequences()
    F.cross_entropy(model(x), y).backward()
    (recording,) = opt._capture.arrivals.take_all()
    recorded = [(r.x, r.p_h, r.later) for r in recording.layers]
    opt._capture.retrace(recording)
    torch.testing.assert_close([(r.x, r.p_h, r.later) for r in recording.layers], recorded, **tight)


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return found


@pytest.mark.parametrize("make", [lambda: Attends("cross"), lambda: Recurs("GRU", 2)])
def test_activation_checkpointing_gives_the_same_steps(make: Any) -> None:
    a = make()
    b = Checkpointed(copy.deepcopy(a))
    train(a, DDPNOpt(a))
    opt = DDPNOpt(b)
    train(b, opt)
    assert opt.report.open_loop == []
    torch.testing.assert_close(core(a), core(b.inner), **tight)


@pytest.mark.parametrize("make", [lambda: Attends("self"), lambda: Recurs("LSTM")])
def test_compiled_models_train_without_feedback_in_fused_modules(make: Any) -> None:
    a = make()
    b = copy.deepcopy(a)
    compiled = torch.compile(a, backend="eager")
    opt = DDPNOpt(a, 0.1, value="outer", exclude=[])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OpenLoopWarning)
        train(compiled, opt, 2)
        train(b, DDPNOpt(b, 0.1, value="outer", exclude=["attention" if hasattr(b, "attention") else "recurrent"]), 2)
    if opt.report.open_loop:
        torch.testing.assert_close(core(a), core(b), **tight)


def test_a_copy_of_the_model_and_evaluation_use_the_fused_call() -> None:
    model = Attends("self")
    opt = DDPNOpt(model)
    train(model, opt, 1)
    twin = copy.deepcopy(model)
    x, _ = sequences()
    torch.testing.assert_close(twin(x), model(x), **tight)
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(x), twin.eval()(x), **tight)
    assert set(model.state_dict()) == set(Attends("self").state_dict())


def test_attention_in_evaluation_mode_is_left_to_the_base_optimizer() -> None:
    model = Attends("self")
    model.attention.eval()
    opt = DDPNOpt(model)
    with pytest.warns(OpenLoopWarning, match=r"attention\.in_proj_weight"):
        train(model, opt, 1)


def test_projections_are_left_to_the_base_optimizer() -> None:
    assert fuse("", nn.LSTM(4, 6, proj_size=3)) is None


def test_a_frozen_projection_leaves_the_module_to_the_base_optimizer() -> None:
    model = Recurs("LSTM")
    model.recurrent.weight_hh_l0.requires_grad_(False)
    before = model.recurrent.weight_hh_l0.clone()
    with pytest.warns(OpenLoopWarning, match=r"recurrent\.weight_ih_l0"):
        train(model, DDPNOpt(model), 2)
    assert torch.equal(before, model.recurrent.weight_hh_l0)


def test_transformer_layers_have_feedback_in_all_parameters() -> None:
    class Coder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, 0.1, batch_first=True), 2)
            self.decode = nn.TransformerDecoderLayer(4, 2, 8, 0.1, batch_first=True)
            self.out = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.decode(x, self.encode(x[:, 1:])).mean(1))

    model = Coder()
    opt = DDPNOpt(model)
    train(model, opt, 3)
    assert opt.report.open_loop == []
