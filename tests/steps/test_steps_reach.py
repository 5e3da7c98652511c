"""No step changes a layer by more than a part of its size."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from step_runs import losses_of
from torch import Tensor, nn

from ddpnopt import DDPNOpt
from ddpnopt.ddp.step_length import GROWTH, REACH
from ddpnopt.linear.layer import spectral_norm as of_update


def plain(depth: int, width: int, activation: type[nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    sizes = [8, *[width] * depth]
    layers = [m for n_in, n_out in pairwise(sizes) for m in (nn.Linear(n_in, n_out), activation())]
    return nn.Sequential(*layers, nn.Linear(width, 3))


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 32, 8, generator=generator)
    return [(each, each[:, :3].argmax(1)) for each in x]


def spectral_norm(a: Tensor) -> float:
    return float(torch.linalg.matrix_norm(a, 2))


@pytest.mark.parametrize(
    ("depth", "width", "activation"),
    [(15, 16, nn.Sigmoid), (20, 16, nn.Tanh), (3, 64, nn.ReLU), (1, 2, nn.ReLU)],
    ids=["15 sigmoid layers", "20 tanh layers", "wide", "narrow"],
)
def test_no_step_changes_a_layer_by_more_than_a_part_of_its_size(
    depth: int, width: int, activation: type[nn.Module]
) -> None:
    model = plain(depth, width, activation)
    opt = DDPNOpt(model)
    layers = [m for m in model if isinstance(m, nn.Linear)]
    for x, y in batches(20):
        before = [layer.weight.detach().clone() for layer in layers]
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
        for old, layer in zip(before, layers, strict=True):
            m, n = old.shape
            size = float(old.square().mean().sqrt()) * (m**0.5 + n**0.5)
            assert spectral_norm(layer.weight.detach() - old) <= 1.001 * GROWTH * REACH * size


def test_weights_stay_bounded_where_gradients_vanish() -> None:
    model = plain(15, 16, nn.Sigmoid)
    losses_of(model, batches(60))
    assert max(float(p.detach().abs().max()) for p in model.parameters()) < 10  # without a limit: hundreds


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e15])
def test_the_norm_of_a_change_is_found_at_any_scale(scale: float) -> None:
    """Where it was lost, a step of any size was within the limit."""
    torch.manual_seed(0)
    change = torch.randn(40, 30, dtype=torch.float32)
    assert 0.8 <= of_update(scale * change) / (scale * spectral_norm(change)) <= 1.001  # from below
    size = float((scale * change.double()).norm())
    assert 0.8 <= of_update(scale * change, size) / (scale * spectral_norm(change)) <= 1.001


@pytest.mark.parametrize("shape", [(20, 20), (3, 50), (40, 7), (1, 5)])
def test_the_norm_of_a_change_in_few_rows_is_within_a_few_percent(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    for rank in (1, 2, min(shape)):
        change = torch.randn(shape[0], rank) @ torch.randn(rank, shape[1])
        assert 0.96 <= of_update(change, float(change.norm())) / spectral_norm(change) <= 1.001


@pytest.mark.parametrize("last", [nn.Sigmoid(), nn.Softmax(1)], ids=["sigmoid", "softmax"])
def test_outputs_that_cannot_reach_the_targets_do_not_make_the_weights_grow_for_ever(last: nn.Module) -> None:
    """Cross-entropy of probabilities: its least value is far above zero, and all gradients vanish there."""
    torch.set_default_dtype(torch.float32)
    model = plain(2, 10, nn.Tanh).append(last)
    examples = [(x.float(), y) for x, y in batches(20)] * 20
    losses = losses_of(model, [(x[:8], y[:8]) for x, y in examples])
    assert sum(losses[-20:]) / 20 < 0.8  # at least 0.551, and log 3 = 1.10 at chance
    assert max(float(p.detach().abs().max()) for p in model.parameters()) < 1e4


def test_a_layer_that_starts_at_zero_leaves_it_as_fast_as_others_move() -> None:
    losses = []
    for zero in (False, True):
        model = plain(2, 32, nn.ReLU)
        if zero:
            nn.init.zeros_(model[-1].weight)
        losses.append(losses_of(model, batches(40))[-1])
    assert losses[1] < 1.5 * losses[0] + 0.05


def test_layers_that_weight_decay_has_made_small_can_grow_again() -> None:
    """A layer counts as no smaller than it was at its start."""
    model = plain(3, 32, nn.ReLU)
    losses = losses_of(model, batches(100), DDPNOpt(model, weight_decay=1e-2))
    assert sum(losses[-10:]) / 10 < 0.7  # 1.03 where the limit follows the decay
