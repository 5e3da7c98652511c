"""Gradients and steps in balanced variables against the factors psi and xi, written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ddpnopt._distributed import ALONE
from ddpnopt.ddp.balance import DECAY, FLOOR, balanced
from ddpnopt.linear.layer import Layer
from ddpnopt.linear.metric import IDENTITY
from ddpnopt.trace.model_layers import find_layers

B = 6


def layer_of(module: nn.Module) -> Layer:
    model = nn.Sequential(module)
    (found,) = find_layers(model, set(model.parameters()), frozenset(), every_kind=True)
    return found.layer


def profile(a: Tensor, dim: int) -> Tensor:
    squares = a.square().movedim(dim, 0).flatten(1).mean(1)
    return squares / squares.mean()


CASES = {
    "linear": (nn.Linear(4, 3), lambda: torch.randn(B, 4) * torch.tensor([0.1, 1.0, 3.0, 10.0])),
    "linear on tokens": (nn.Linear(4, 3), lambda: torch.randn(B, 5, 4) * torch.tensor([0.1, 1.0, 3.0, 10.0])),
    "without bias": (nn.Linear(4, 3, bias=False), lambda: torch.randn(B, 4)),
    "convolution": (nn.Conv2d(4, 6, 3, padding=1), lambda: torch.randn(B, 4, 5, 5) * torch.rand(4, 1, 1)),
    "groups": (nn.Conv2d(4, 6, 3, groups=2), lambda: torch.randn(B, 4, 5, 5) * torch.rand(4, 1, 1)),
    "embedding": (nn.Embedding(7, 3), lambda: torch.randint(7, (B, 4))),
    "norm": (nn.LayerNorm(4), lambda: torch.randn(B, 4)),
}


def explicit_factors(name: str, x: Tensor, p: Tensor) -> list[Tensor]:
    """psi_o xi_j for each weight, psi_o for each bias."""
    module = CASES[name][0]
    weight = torch.empty(module.weight.shape)
    if name == "norm":
        return [torch.ones(4), torch.ones(4)]
    output_dim = 1 if isinstance(module, nn.Conv2d) else -1
    psi = (profile(p, output_dim) + FLOOR) ** -0.25
    if name == "embedding":
        return [psi.expand(7, 3)]
    squares = x.square().movedim(output_dim, 0).flatten(1).mean(1)
    constant = (1 / squares.mean() + FLOOR) ** -0.25
    xi, psi = (profile(x, output_dim) + FLOOR) ** -0.25 / constant, psi * constant
    per_group = weight.shape[1]
    groups = len(xi) // per_group
    for o in range(weight.shape[0]):
        group = o // (weight.shape[0] // groups)
        for j in range(per_group):
            weight[o, j] = psi[o] * xi[group * per_group + j]
    return [weight, psi] if module.bias is not None else [weight]


@pytest.mark.parametrize("name", CASES)
def test_gradients_in_balanced_variables_have_the_factors_psi_and_xi(name: str) -> None:
    module, make = CASES[name]
    module = module.double()
    x = make()
    h = module(x)
    p = torch.randn_like(h) * torch.rand(h.shape[1] if isinstance(module, nn.Conv2d) else h.shape[-1]).view(
        *([-1, 1, 1] if isinstance(module, nn.Conv2d) else [-1])
    )
    layer = layer_of(module)
    seen = x if name != "norm" else nn.functional.layer_norm(x, (4,))  # what the scale and shift act on
    found = balanced(layer, seen, p, {}, ALONE)
    expected = explicit_factors(name, x, p)
    samples = layer.sample_gradients(found.inputs(seen), found.outputs(p), others=B)
    w = torch.randn(B)
    for i, parameter in enumerate(module.parameters()):
        (plain,) = torch.autograd.grad((h * p * w.view(-1, *[1] * (p.dim() - 1))).sum(), parameter, retain_graph=True)
        factor = expected[i]
        torch.testing.assert_close(found.factors[i] * torch.ones_like(plain), factor * torch.ones_like(plain))
        torch.testing.assert_close(samples.combine(w)[i], plain * factor)


def test_the_gram_matrix_is_that_of_the_balanced_gradients() -> None:
    module, make = CASES["groups"]
    module = module.double()
    x = make()
    h = module(x)
    p = torch.randn_like(h)
    layer = layer_of(module)
    found = balanced(layer, x, p, {}, ALONE)
    rows = []
    for i in range(B):
        grads = torch.autograd.grad((h[i] * p[i]).sum(), list(module.parameters()), retain_graph=True)
        rows.append(torch.cat([g.flatten() for g in found.scale(list(grads))]))
    P = torch.stack(rows)
    K = layer.sample_gradients(found.inputs(x), found.outputs(p), others=B).gram(IDENTITY)
    torch.testing.assert_close(K, P @ P.T)


def test_profiles_are_running_averages_without_bias_towards_the_start() -> None:
    layer = layer_of(nn.Linear(4, 3))
    state: dict[str, object] = {}
    batches = [(torch.randn(B, 4) * torch.rand(4), torch.randn(B, 3) * torch.rand(3)) for _ in range(5)]
    for x, p in batches:
        found = balanced(layer, x, p, state, ALONE)
    powers = torch.tensor([DECAY**k for k in range(5)][::-1])
    mean = (powers[:, None] * torch.stack([profile(p, -1) for _, p in batches])).sum(0) / powers.sum()
    constants = torch.stack([1 / x.square().mean() for x, _ in batches])
    constant = (powers * constants).sum() / powers.sum()
    torch.testing.assert_close(found.factors[1], ((mean + FLOOR) * (constant + FLOOR)) ** -0.25)


def test_a_constant_profile_changes_nothing_but_the_size_and_silent_features_stay_bounded() -> None:
    layer = layer_of(nn.Linear(4, 3))
    x, p = torch.ones(B, 4), torch.ones(B, 3)
    found = balanced(layer, x, p, {}, ALONE)
    torch.testing.assert_close(found.factors[0], ((1 + FLOOR) ** -0.5) * torch.ones(3, 4))
    x[:, 0], p[:, 0] = 0.0, 0.0
    found = balanced(layer, x, p, {}, ALONE)
    loud, silent = float(found.factors[0][1, 1]), float(found.factors[0][0, 0])
    assert loud < silent < loud / FLOOR**0.5 * 1.5
    zero = balanced(layer, torch.zeros(B, 4), torch.zeros(B, 3), {}, ALONE)
    assert all(bool(factor.isfinite().all()) for factor in zero.factors)
