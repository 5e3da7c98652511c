"""Large layers: inner products through random combinations of features, sums exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ddpnopt._distributed import ALONE
from ddpnopt.ddp import sketched
from ddpnopt.ddp.balance import Mixing, balanced
from ddpnopt.ddp.balanced import InBalance
from ddpnopt.ddp.balanced_forms import balanced_gradients
from ddpnopt.ddp.sketched import Sketched, SketchedProducts, combinations, is_large
from ddpnopt.linear.convolution import Conv
from ddpnopt.linear.linear import Linear
from ddpnopt.linear.metric import IDENTITY

B = 4
CONV = Conv((40, 48, 3, 3), True, 1, (1, 1), (1, 1), (1, 1))
STRIDED = Conv((40, 48, 3, 3), False, 1, (2, 2), (1, 1), (1, 1))
Case = tuple[Linear | Conv, Callable[[], Tensor], tuple[int, ...], type]
CASES: dict[str, Case] = {
    "tokens": (Linear((40, 36), True), lambda: torch.randn(B, 5, 36), (B, 5, 40), Sketched),
    "many outputs": (Linear((160, 6), False), lambda: torch.randn(B, 5, 6), (B, 5, 160), Sketched),
    "convolution": (CONV, lambda: torch.randn(B, 48, 5, 5), (B, 40, 5, 5), Sketched),
    "strides": (STRIDED, lambda: torch.randn(B, 48, 5, 5), (B, 40, 3, 3), Sketched),
    "several uses": (CONV, lambda: torch.randn(B, 2, 48, 5, 5), (B, 2, 40, 5, 5), Sketched),
    "wide features": (Linear((160, 150), True), lambda: torch.randn(B, 3, 150), (B, 3, 160), Sketched),
    "linear": (Linear((80, 90), True), lambda: torch.randn(B, 90), (B, 80), SketchedProducts),
    "linear without bias": (Linear((160, 150), False), lambda: torch.randn(B, 150), (B, 160), SketchedProducts),
}


@pytest.fixture(autouse=True)
def any_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small layers count as large, too."""
    if "samples" not in request.fixturenames:
        monkeypatch.setattr(sketched, "WORK", (0, 0))


def made(name: str) -> tuple[Linear | Conv, Tensor, Tensor, dict[str, Any], Mixing, type]:
    layer, make, shape, form = CASES[name]
    torch.manual_seed(0)
    x, p, state = make().double(), torch.randn(shape).double(), {}
    dims = [1] * x.dim()
    dims[layer.feature_dims[0]] = -1  # type: ignore[index]
    x *= torch.linspace(0.2, 3, layer.weight_shape[1]).view(dims).double()
    balance = balanced(layer, x, p, state, ALONE, "layer")
    assert isinstance(balance, Mixing)
    return layer, x, p, state, balance, form


def redrawn(balance: Mixing, seed: int) -> None:
    for root in (balance.input_root, balance.output_root):
        root.kept.pop("sketch", None)
        root.kept["seed"] += seed


@pytest.mark.parametrize("name", CASES)
def test_sums_are_exact(name: str) -> None:
    layer, x, p, _, balance, form = made(name)
    plain = InBalance(layer, x, p, balance, B, None)
    found = balanced_gradients(layer, x, p, balance, others=B, recompute=None)
    assert type(found) is form
    w = torch.randn(B).double()
    for part, right in zip(found.combine(w), plain.combine(w), strict=True):
        torch.testing.assert_close(part, right)


@pytest.mark.parametrize("name", CASES)
def test_combinations_of_an_update_follow_from_those_of_the_gradients(name: str) -> None:
    layer, x, p, _, balance, form = made(name)
    found = balanced_gradients(layer, x, p, balance, others=B, recompute=None)
    assert isinstance(found, (Sketched, SketchedProducts))
    w, last = torch.randn(B).double(), [torch.randn(part.shape).double() for part in found.combine(torch.ones(B))]
    update = [0.3 * part + 0.5 * old for part, old in zip(found.combine(w), last, strict=True)]
    sums = found.sum_of(w, 0.3, [(0.5, last)])
    torch.testing.assert_close(sums, found.of_step(update))
    again = form(layer, x, p, balance, found.k)
    again.know(update, sums)
    torch.testing.assert_close(again.effect(update), found.effect(update))
    more = form(layer, x, p, balance, found.k + 8)  # other combinations, to which those of a few samples are no use
    more.know(update, sums)
    assert more.of_step(update).shape != sums.shape


@pytest.mark.parametrize("name", CASES)
def test_inner_products_and_effects_are_right_on_average(name: str) -> None:
    layer, x, p, _, balance, _ = made(name)
    step = [torch.randn(layer.weight_shape).double()] + [torch.randn(layer.bias_shape).double()] * layer.bias
    plain = InBalance(layer, x, p, balance, B, None)
    K, (effect,) = plain.couple([step])
    grams, effects = [], []
    for seed in range(300):
        redrawn(balance, seed)
        found, (own,) = balanced_gradients(layer, x, p, balance, others=B, recompute=None).couple([step])
        grams.append(found)
        effects.append(own)
    for exact, drawn in ((K, torch.stack(grams)), (effect, torch.stack(effects))):
        error = drawn.std(0) / len(drawn) ** 0.5
        # the norms of rank-one gradients are exact, which costs a little of the average
        slack = 0.05 * K.diagonal().mean() if name.startswith("linear") and drawn.dim() == 3 else 0.0
        assert ((drawn.mean(0) - exact).abs() <= 4.5 * error + slack + 1e-9).all()


@pytest.mark.parametrize("name", CASES)
def test_errors_are_small_beside_the_mean_diagonal(name: str) -> None:
    layer, x, p, _, balance, _ = made(name)
    K = InBalance(layer, x, p, balance, B, None).couple([])[0]
    found = balanced_gradients(layer, x, p, balance, others=B, recompute=None).couple([])[0]
    assert torch.linalg.matrix_norm(found - K, 2) < K.diagonal().mean()


def test_what_lies_in_the_leading_directions_is_exact() -> None:
    layer = Linear((40, 36), True)
    k = combinations(layer, B)
    x, p = torch.randn(B, 5, k // 2) @ torch.randn(k // 2, 36), torch.randn(B, 5, k // 2) @ torch.randn(k // 2, 40)
    balance = balanced(layer, x.double(), p.double(), {}, ALONE)
    assert isinstance(balance, Mixing)
    plain = layer.sample_gradients(balance.inputs(x.double()), balance.outputs(p.double()))
    found = Sketched(layer, x.double(), p.double(), balance, k)
    step = [torch.randn(40, 36).double(), torch.randn(40).double()]
    K, (effect,) = found.couple([step])
    torch.testing.assert_close(K, plain.gram(IDENTITY))
    torch.testing.assert_close(effect, (layer.apply(x.double(), step) * p.double()).flatten(1).sum(1))


def test_the_norm_of_a_rank_one_gradient_is_exact() -> None:
    layer, x, p, _, balance, _ = made("linear")
    K = InBalance(layer, x, p, balance, B, None).couple([])[0]
    found = balanced_gradients(layer, x, p, balance, others=B, recompute=None).couple([])[0]
    torch.testing.assert_close(found.diagonal(), K.diagonal())


def test_each_layer_and_each_look_has_its_own_combinations() -> None:
    layer, x, p, state, balance, _ = made("tokens")
    first = balanced_gradients(layer, x, p, balance, others=B, recompute=None).couple([])[0]
    same = balanced_gradients(layer, x, p, balance, others=B, recompute=None).couple([])[0]
    other = balanced(layer, x, p, {}, ALONE, "another layer")
    looked = balanced(layer, x, p, state, ALONE, "layer")
    assert torch.equal(first, same)
    for balance in (other, looked):
        assert not torch.allclose(
            first, balanced_gradients(layer, x, p, balance, others=B, recompute=None).couple([])[0], rtol=1e-3
        )


@pytest.mark.parametrize("places", [1, 50])
@pytest.mark.parametrize("samples", [1, 4, 64, 1000])
def test_small_layers_are_exact_and_large_ones_keep_several_numbers_for_each_sample(samples: int, places: int) -> None:
    large = Linear((8000, 8000), True)
    k = combinations(large, samples)
    assert k * k >= 32 * samples
    assert not is_large(Linear((k, 4 * k - 1), True), samples, places)
    assert not is_large(Linear((20, 20), True), samples, places)
    assert is_large(large, samples, places)
