"""Norms and embeddings with feedback: the products of these layers, which modules take part, and when they do not."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from optimizer_networks import distance, twins, vectors, weights
from torch import Tensor, nn

from ddpnopt import DDPNOpt, OpenLoopWarning
from ddpnopt.linear import lookup
from ddpnopt.linear.elementwise import ScaleShift
from ddpnopt.linear.layer import Layer
from ddpnopt.linear.lookup import Lookup
from ddpnopt.linear.metric import Metric


def train(model: nn.Module, opt: torch.optim.Optimizer, data: Callable[..., tuple[Tensor, Tensor]], steps: int) -> None:
    for seed in range(steps):
        x, y = data(seed=seed)
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()


tight = {"rtol": 1e-10, "atol": 1e-12}


@st.composite
def scales(draw: st.DrawFn) -> tuple[Layer, Tensor, Tensor]:
    B, first = draw(st.integers(1, 4)), draw(st.booleans())
    weight = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=1 if first else 3)))
    places = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
    shape = (B, *weight, *places) if first else (B, *places, *weight)
    return ScaleShift(weight, draw(st.booleans()), first), torch.randn(shape), torch.randn(shape)


@st.composite
def lookups(draw: st.DrawFn) -> tuple[Layer, Tensor, Tensor]:
    V, d = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    padding = draw(st.none() | st.integers(0, V - 1))
    return Lookup((V, d), padding), torch.randint(V, shape), torch.randn(*shape, d)


def per_sample(layer: Layer, x: Tensor, p: Tensor) -> Tensor:
    """g_u' p_i of each sample by autograd, through the layer's own map: (B, parameters)."""
    u = [torch.randn(layer.weight_shape, requires_grad=True) for _ in range(1 + layer.bias)]
    found = []
    for i in range(len(x)):
        grads = torch.autograd.grad((layer.apply(x[i : i + 1], u) * p[i : i + 1]).sum(), u)
        found.append(torch.cat([g.flatten() for g in grads]))
    return torch.stack(found)


@settings(max_examples=80, deadline=None)
@given(st.one_of(scales(), lookups()), st.booleans(), st.sampled_from([1, 2**22]))
def test_products_with_per_sample_gradients_are_those_of_explicit_ones(
    case: tuple[Layer, Tensor, Tensor], diagonal: bool, held: int
) -> None:
    layer, x, p = case
    P = per_sample(layer, x, p)
    parts = 1 + layer.bias
    D = [torch.rand(layer.weight_shape) + 0.1 for _ in range(parts)]
    metric = Metric(D=D) if diagonal else Metric()
    M = torch.cat([d.flatten() for d in D]) if diagonal else torch.ones(P.shape[1])
    q, w = torch.randn_like(p), torch.randn(len(x))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookup, "HELD", held)
        made = layer.sample_gradients(x, p, others=len(x))
        torch.testing.assert_close(made.gram(metric), P * M @ P.T, **tight)
        other = layer.sample_gradients(x.flip(0)[:2], p.flip(0)[:2])
        torch.testing.assert_close(made.gram(metric, other), P * M @ P.flip(0)[:2].T, **tight)
    torch.testing.assert_close(made.dots(metric), (P * M * P).sum(1), **tight)
    torch.testing.assert_close(made.dots(metric, q), (P * M * per_sample(layer, x, q)).sum(1), **tight)
    for found, scale in ((made.combine(w), torch.ones_like(M)), (made.solved(w, metric), M)):
        torch.testing.assert_close(torch.cat([f.flatten() for f in found]), w @ P * scale, **tight)
        assert all(f.shape == layer.weight_shape for f in found)
    u = [torch.zeros(layer.weight_shape) for _ in range(parts)]
    made.add_to(u, w, -2.0)
    torch.testing.assert_close(torch.cat([a.flatten() for a in u]), -2 * w @ P, **tight)
    torch.testing.assert_close(torch.cat([g.flatten() for g in layer.grad(x, p)]), P.sum(0), **tight)


@settings(max_examples=40, deadline=None)
@given(st.one_of(scales(), lookups()))
def test_the_joint_and_the_column_form_are_those_of_the_map(case: tuple[Layer, Tensor, Tensor]) -> None:
    layer, x, p = case
    u = [torch.randn(layer.weight_shape) for _ in range(1 + layer.bias)]
    joint = layer.join(u)
    assert joint.shape == layer.joint_shape
    assert all(torch.equal(a, b) for a, b in zip(layer.split(joint), u, strict=True))
    rows = torch.einsum("bpgj,goj->bpgo", layer.augmented(x).to(joint.dtype), joint)
    torch.testing.assert_close(layer.unrows(rows), layer.apply(x, u).reshape(len(x), -1), **tight)
    torch.testing.assert_close(layer.unrows(layer.rows(p)), p.reshape(len(x), -1), **tight)
    if x.is_floating_point():
        x.requires_grad_()
        (wanted,) = torch.autograd.grad((layer.apply(x, u) * p).sum(), x)
        torch.testing.assert_close(layer.input_grad(p, u[0], x.shape), wanted, **tight)


class Sentences(nn.Module):
    """Words and positions, as in most language models; as many positions as samples."""

    def __init__(self, batched_positions: bool = False) -> None:
        super().__init__()
        self.batched = batched_positions
        self.words, self.positions, self.norm = nn.Embedding(7, 5), nn.Embedding(4, 5), nn.LayerNorm(5)
        self.out = nn.Linear(5, 3)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1])
        where = self.positions(positions[None] if self.batched else positions)
        return self.out(torch.tanh(self.norm(self.words(ids) + where)).mean(1))


def sentences(n: int = 4, seed: int = 0, length: int = 4) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(7, (n, length), generator=g), torch.randint(3, (n,), generator=g)


@pytest.mark.filterwarnings("ignore::ddpnopt.OpenLoopWarning")
@pytest.mark.parametrize("value", ["batch", "outer"])
def test_small_steps_follow_the_whole_gradient(value: str) -> None:
    model = Sentences()
    before, twin = weights(model), copy.deepcopy(model)
    x, y = sentences()
    F.cross_entropy(twin(x), y).backward()
    opt = DDPNOpt(model, 1e-7, value=value, exclude=["positions"], open_loop_lr=0.0)
    train(model, opt, sentences, 1)
    for old, (name, new), p in zip(before, model.named_parameters(), twin.parameters(), strict=True):
        if name != "positions.weight":
            torch.testing.assert_close((old - new.detach()) / 1e-7, p.grad, rtol=1e-4, atol=1e-6)


def test_an_embedding_of_a_transposed_input_takes_part_as_that_of_the_input_itself() -> None:
    class SequenceFirst(Sentences):
        def forward(self, ids: Tensor) -> Tensor:
            return self.out(torch.tanh(self.words(ids.T).transpose(0, 1)).mean(1))

    class BatchFirst(Sentences):
        def forward(self, ids: Tensor) -> Tensor:
            return self.out(torch.tanh(self.words(ids)).mean(1))

    a, b = SequenceFirst(), BatchFirst()
    b.load_state_dict(a.state_dict())
    for model in (a, b):
        opt = DDPNOpt(model, 0.1, value="outer")
        train(model, opt, partial(sentences, 6), 2)
        assert opt.report.open_loop == []
    torch.testing.assert_close(a.words.weight, b.words.weight, **tight)


def pooled() -> nn.Module:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = nn.Embedding(7, 5), nn.Linear(5, 3)

        def forward(self, ids: Tensor) -> Tensor:
            return self.out(torch.tanh(self.words(ids).mean(1)))

    return Pooled()


def accumulate(model: nn.Module, opt: Any, parts: list[tuple[Tensor, Tensor]]) -> None:
    n = sum(len(y) for _, y in parts)
    for x, y in parts:
        (F.cross_entropy(model(x), y) * len(y) / n).backward()
    opt.step()


def test_micro_batches_of_one_length_are_one_batch() -> None:
    a, b = twins(pooled())
    x, y = sentences(6)
    accumulate(a, DDPNOpt(a), [(x, y)])
    accumulate(b, DDPNOpt(b), [(x[:4], y[:4]), (x[4:], y[4:])])
    assert distance(a, b) < 1e-10


def test_micro_batches_of_different_lengths_have_feedback_and_to_first_order_the_step_of_sgd() -> None:
    start, rate = pooled(), 1e-6
    a, b = twins(copy.deepcopy(start))
    parts = [sentences(4, length=3), sentences(2, seed=1, length=5)]
    opt = DDPNOpt(a, rate, value="outer")
    accumulate(a, opt, parts)
    assert opt.report.open_loop == []
    accumulate(b, torch.optim.SGD(b.parameters(), rate), parts)
    for p, mine, theirs in zip(start.parameters(), a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close((mine - p) / rate, (theirs - p) / rate, rtol=1e-4, atol=1e-5)


# -- which modules take part -------------------------------------------------------------------------------------------


def normed() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 3)
    )


NORMS = ["1.weight", "1.bias", "4.weight", "4.bias"]


@pytest.mark.parametrize(
    ("options", "open_loop"),
    [
        ({}, []),
        ({"curvature": "adam", "lr": 0.01}, []),
        ({"value": "outer", "lr": 0.1, "curvature": "rmsprop"}, []),
        ({"curvature": "kfac"}, NORMS),
        ({"value": "outer", "lr": 0.1, "curvature": "ekfac"}, NORMS),
        ({"exclude": ["4"]}, NORMS[2:]),
    ],
)
def test_norms_have_feedback_in_the_forms_that_need_no_kronecker_factors(
    options: dict[str, Any], open_loop: list[str]
) -> None:
    model = normed()
    opt = DDPNOpt(model, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OpenLoopWarning)
        train(model, opt, vectors, 2)
    assert opt.report.open_loop == open_loop


@pytest.mark.filterwarnings("ignore::ddpnopt.OpenLoopWarning")
def test_with_the_full_form_norms_are_trained_by_the_base_optimizer() -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3))
    opt = DDPNOpt(model, 0.1, value="full")
    train(model, opt, vectors, 1)
    assert opt.report.open_loop == ["1.weight", "1.bias"]


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_an_embedding_with_a_gradient_or_a_forward_of_its_own_kind_is_no_layer(option: dict[str, Any]) -> None:
    from ddpnopt.trace.model_layers import describe

    assert describe(nn.Embedding(4, 3, **option)) is None
    assert describe(nn.Embedding(4, 3)) is not None


def test_running_statistics_are_updated_once_and_the_row_of_the_padding_stays() -> None:
    a, b = twins(normed())
    train(a, DDPNOpt(a), vectors, 1)
    b(vectors()[0])
    assert all(map(torch.equal, a.buffers(), b.buffers()))

    model = nn.Sequential(nn.Embedding(7, 3, padding_idx=2), nn.Flatten(), nn.Linear(12, 3))
    nn.init.ones_(model[0].weight)
    train(model, DDPNOpt(model), sentences, 3)
    assert torch.equal(model[0].weight[2], torch.ones(3))
    assert not torch.equal(model[0].weight[3], torch.ones(3))


@pytest.mark.parametrize("frozen", ["shift", "statistics"])
def test_a_frozen_shift_and_frozen_statistics_stay(frozen: str) -> None:
    model = normed()
    kept = model[1].bias if frozen == "shift" else model[1].running_mean
    assert isinstance(kept, Tensor)
    if frozen == "shift":
        model[1].bias.requires_grad_(False)
    else:
        model[1].eval()
    before, scale = kept.clone(), model[1].weight.detach().clone()
    opt = DDPNOpt(model)
    train(model, opt, vectors, 3)
    assert torch.equal(before, kept)
    assert not torch.equal(scale, model[1].weight)
    assert opt.report.open_loop == []


@pytest.mark.parametrize("curvature", ["identity", "adam"])
def test_a_state_from_before_norms_had_feedback_is_loaded(curvature: str) -> None:
    """Then each of their parameters had the state of Adam."""
    model, old = normed(), normed()
    opt = DDPNOpt(old, 0.01, curvature=curvature, exclude=["1", "4"])
    with pytest.warns(OpenLoopWarning):
        train(old, opt, vectors, 5)
    assert "exp_avg" in opt.state[old[1].bias]
    model.load_state_dict(old.state_dict())
    loaded = DDPNOpt(model, 0.01, curvature=curvature)
    loaded.load_state_dict(opt.state_dict())
    fresh = copy.deepcopy(old)
    train(model, loaded, vectors, 2)
    train(fresh, DDPNOpt(fresh, 0.01, curvature=curvature), vectors, 2)
    assert loaded.report.open_loop == []
    assert loaded.steps == 7
    if curvature == "identity":
        torch.testing.assert_close(torch.tensor(loaded.samples), torch.tensor(opt.samples + 2 * len(vectors()[0])))


# -- the rest of the loop ----------------------------------------------------------------------------------------------


def test_a_loss_computed_inside_the_model_behind_a_norm_is_recognised() -> None:
    class WithLoss(nn.Sequential):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(super().forward(x), y)

    x, y = vectors(8)
    body = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3), nn.BatchNorm1d(3))
    inside, outside = WithLoss(*copy.deepcopy(body)), copy.deepcopy(body)
    opt, other = DDPNOpt(inside, closed_loop=False), DDPNOpt(outside, closed_loop=False)
    inside(x, y).backward()
    F.cross_entropy(outside(x), y).backward()
    opt.step()
    other.step()
    assert distance(inside, outside) < 1e-9


class Loop(nn.Module):
    """A block of a language model that runs three times."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.again = nn.Embedding(7, 5), nn.LayerNorm(5), nn.Linear(5, 5)
        self.out = nn.Linear(5, 3)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.words(ids)
        for _ in range(3):
            h = h + torch.tanh(self.again(self.norm(h)))
        return self.out(h.mean(1))


@pytest.mark.parametrize("options", [{"recompute": True}, {"recompute": False}, {"weight_grads": True}])
@pytest.mark.parametrize("terminal", ["sqrt", "cross_entropy"])
def test_options_of_memory_and_gradients_do_not_change_a_step_with_norms_and_reuse(
    terminal: str, options: dict[str, Any]
) -> None:
    a, b = twins(Loop())
    opt = DDPNOpt(a, terminal=terminal)
    train(a, opt, sentences, 4)
    train(b, DDPNOpt(b, terminal=terminal, **options), sentences, 4)
    assert distance(a, b) < 1e-9
    assert opt.report.open_loop == []
    assert opt.report.undone == 0


def test_a_step_that_is_repeated_with_a_smaller_share_starts_from_the_same_states() -> None:
    """The retraced pass of a network with norms and reuse: the second attempt is a step with that share."""
    for seed in range(40):
        torch.manual_seed(seed)
        a, b = twins(Loop())
        opt = DDPNOpt(a, 1e3, dof=1.0)
        train(a, opt, sentences, 1)
        if opt.report.shortened and not opt.report.undone:
            break
    assert opt.report.shortened == 1
    distances = []
    for attempt in (1, 2, 3):
        c = copy.deepcopy(b)
        again = DDPNOpt(c, 1e3, dof=1.0, relax=0.25**attempt)
        train(c, again, sentences, 1)
        if not again.report.shortened:
            distances.append(distance(a, c))
    assert min(distances) < 1e-8


@pytest.mark.parametrize("statistics", [False, True], ids=["of each sample", "tracked"])
def test_an_instance_norm_takes_the_step_of_a_group_norm_with_one_group_for_each_channel(statistics: bool) -> None:
    def network(norm: nn.Module) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(2, 4, 3), norm, nn.ReLU(), nn.Conv2d(4, 3, 3), nn.Flatten(), nn.Linear(12, 3))

    torch.manual_seed(0)
    model = network(nn.InstanceNorm2d(4, affine=True, track_running_stats=statistics))
    twin = network(nn.GroupNorm(4, 4))
    twin.load_state_dict(model.state_dict(), strict=False)
    x, y = torch.randn(6, 2, 6, 6), torch.arange(6) % 3
    once = copy.deepcopy(model)
    once(x)
    for net in (model, twin):
        opt = DDPNOpt(net)
        for _ in range(4):
            opt.zero_grad()
            F.cross_entropy(net(x), y).backward()
            opt.step()
            if statistics and net is model and opt.report.step == 1:
                torch.testing.assert_close(model[1].running_mean, once[1].running_mean)
        assert opt.report.open_loop == []
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)
