"""Every form of per-sample gradients in balanced variables gives what the plain form gives on balanced inputs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ddpnopt._distributed import ALONE
from ddpnopt.ddp.balance import balanced
from ddpnopt.ddp.balanced import InBalance, OuterProducts, Repeated, Stored, Tokens
from ddpnopt.ddp.balanced_forms import balanced_gradients
from ddpnopt.linear import sample_gradients
from ddpnopt.linear.convolution import Conv
from ddpnopt.linear.elementwise import ScaleShift
from ddpnopt.linear.given import Given
from ddpnopt.linear.layer import Layer, symmetric_product
from ddpnopt.linear.linear import Linear
from ddpnopt.linear.lookup import Lookup
from ddpnopt.linear.metric import IDENTITY
from ddpnopt.linear.transposed import TransposedLinear

B = 6
CONV = Conv((8, 3, 3, 3), True, 1, (1, 1), (1, 1), (1, 1))
GROUPED = Conv((8, 2, 3, 3), True, 2, (2, 2), (1, 1), (1, 1))
Case = tuple[Layer, Callable[[], Tensor], tuple[int, ...], bool | None, type]
CASES: dict[str, Case] = {
    "linear": (Linear((5, 4), True), lambda: torch.randn(B, 4), (B, 5), None, OuterProducts),
    "linear without bias": (Linear((5, 4), False), lambda: torch.randn(B, 4), (B, 5), None, OuterProducts),
    "few tokens": (Linear((14, 15), True), lambda: torch.randn(B, 2, 15), (B, 2, 14), None, Tokens),
    "many tokens": (Linear((3, 4), True), lambda: torch.randn(B, 9, 4), (B, 9, 3), False, Stored),
    "convolution": (CONV, lambda: torch.randn(B, 3, 7, 7), (B, 8, 7, 7), False, Stored),
    "convolution, recomputed": (CONV, lambda: torch.randn(B, 3, 7, 7), (B, 8, 7, 7), True, Repeated),
    "groups": (GROUPED, lambda: torch.randn(B, 4, 7, 7), (B, 8, 4, 4), True, Repeated),
    "norm": (ScaleShift((4,), True, False), lambda: torch.randn(B, 3, 4), (B, 3, 4), None, Stored),
    "embedding": (Lookup((9, 4)), lambda: torch.randint(9, (B, 5)), (B, 5, 4), None, InBalance),
    "loose": (Given((3, 4)), lambda: torch.ones(B, 1), (B, 12), None, Stored),
    "transposed": (TransposedLinear((4, 5), True), lambda: torch.randn(B, 4), (B, 5), None, InBalance),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("pieces", [False, True], ids=["at once", "a few outputs at a time"])
def test_gram_matrix_effects_and_sums_are_those_of_the_plain_form(
    name: str, pieces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, make, shape, recompute, form = CASES[name]
    if pieces:
        monkeypatch.setattr(sample_gradients, "TEMPORARY", 400)
    x, p = make(), torch.randn(shape)
    if x.is_floating_point():
        x *= 1 + torch.arange(x.shape[layer.feature_dims[0] or 0]).view(
            [-1 if d == (layer.feature_dims[0] or 0) % x.dim() else 1 for d in range(x.dim())]
        )
    before = p.clone()
    balance = balanced(layer, x, p, {}, ALONE)
    plain = balance.of(layer).sample_gradients(balance.inputs(x), balance.outputs(p), others=B, recompute=False)
    step = [torch.randn(layer.weight_shape)] + [torch.randn(layer.bias_shape)] * layer.bias
    w = torch.randn(B)

    found = balanced_gradients(layer, x, p, balance, others=B, recompute=recompute)
    K, (effect,) = found.couple([step])

    assert type(found) is form
    torch.testing.assert_close(K, plain.gram(IDENTITY))
    torch.testing.assert_close(effect, (layer.apply(x, step) * p).flatten(1).sum(1))
    expected = balance.scale(plain.combine(w))
    for part, right in zip(found.combine(w), expected, strict=True):
        torch.testing.assert_close(part, right)
    u = [torch.zeros_like(part) for part in step]
    found.add_to(u, w, -2.0)
    for part, right in zip(u, expected, strict=True):
        torch.testing.assert_close(part, -2.0 * right)
    assert torch.equal(p, before)


@pytest.mark.parametrize("rows", [5, 256, 517, 1100])
def test_a_symmetric_product_by_blocks_is_the_product(rows: int) -> None:
    a = torch.randn(rows, 7)
    b = a * torch.rand(7)
    torch.testing.assert_close(symmetric_product(a, b), a @ b.T)
