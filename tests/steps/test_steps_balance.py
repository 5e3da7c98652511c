"""Gradients and steps in balanced variables against the roots of second moments, written out."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from ddpnopt._distributed import ALONE
from ddpnopt.ddp.balance import DECAY, FLOOR, LONGEST, LOW, REFRESH, balanced
from ddpnopt.ddp.covariance import DENSE, LEADING, observe, root
from ddpnopt.linear.layer import Layer
from ddpnopt.linear.metric import IDENTITY
from ddpnopt.trace.model_layers import find_layers

B = 6


def layer_of(module: nn.Module) -> Layer:
    model = nn.Sequential(module)
    (found,) = find_layers(model, set(model.parameters()), frozenset(), every_kind=True)
    return found.layer


CASES = {
    "linear": (nn.Linear(4, 3), lambda: torch.randn(B, 4) * torch.tensor([0.1, 1.0, 3.0, 10.0])),
    "linear on tokens": (nn.Linear(4, 3), lambda: torch.randn(B, 5, 4) * torch.tensor([0.1, 1.0, 3.0, 10.0])),
    "without bias": (nn.Linear(4, 3, bias=False), lambda: torch.randn(B, 4)),
    "convolution": (nn.Conv2d(4, 6, 3, padding=1), lambda: torch.randn(B, 4, 5, 5) * torch.rand(4, 1, 1)),
    "groups": (nn.Conv2d(4, 6, 3, groups=2), lambda: torch.randn(B, 4, 5, 5) * torch.rand(4, 1, 1)),
    "embedding": (nn.Embedding(7, 3), lambda: torch.randint(7, (B, 4))),
    "norm": (nn.LayerNorm(4), lambda: torch.randn(B, 4)),
}


def moments(a: Tensor, dim: int) -> Tensor:
    """Second moments of the features along dim, their mean square 1."""
    rows = a.movedim(dim, -1).flatten(0, -2)
    C = rows.T @ rows / len(rows)
    return C / C.diagonal().mean()


def inverse_root(C: Tensor, floor: float = FLOOR) -> Tensor:
    values, Q = torch.linalg.eigh(C + floor * torch.eye(len(C)))
    return Q @ torch.diag(values**-0.25) @ Q.T


def places_root(x: Tensor, padding: int) -> Tensor:
    """The root of the second moments of what a kernel of 3 x 3 sees of each channel."""
    seen = nn.functional.unfold(x.flatten(0, 1)[:, None], 3, padding=padding)  # (B C, 9, places)
    return inverse_root(moments(seen, 1))


def explicit_scale(name: str, x: Tensor, p: Tensor, u: list[Tensor]) -> list[Tensor]:
    """G^-1/4 u A^-1/4; diagonal where features are not mixed."""
    module = CASES[name][0]
    if name == "norm":
        return u
    dim = 1 if isinstance(module, nn.Conv2d) else -1
    G = moments(p, dim)
    if name == "embedding":
        return [u[0] * (G.diagonal() + FLOOR) ** -0.25]
    A, constant = moments(x, dim), x.square().mean().sqrt()
    if name == "groups":
        A, G = A.diagonal().diag(), G.diagonal().diag()
    T_A, T_G = inverse_root(A) / constant, inverse_root(G, FLOOR if name == "groups" else LOW) * constant
    if name in ("convolution", "groups"):
        u = [(u[0].flatten(2) @ places_root(x, int(name == "convolution"))).view_as(u[0]), u[1]]
    if name == "groups":
        per_group = torch.stack(T_A.diagonal().split(2)).repeat_interleave(3, 0)  # (6, 2)
        weight = torch.einsum("op,pikl->oikl", T_G, u[0]) * per_group[:, :, None, None]
    else:
        weight = torch.einsum("op,pj...,ji->oi...", T_G, u[0], T_A)
    return [weight, *(T_G @ bias for bias in u[1:])]


@pytest.mark.parametrize("name", CASES)
def test_gradients_in_balanced_variables_have_the_inverse_fourth_roots_on_both_sides(name: str) -> None:
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
    samples = found.of(layer).sample_gradients(found.inputs(seen), found.outputs(p), others=B)
    w = torch.randn(B)
    loss = (h * p * w.view(-1, *[1] * (p.dim() - 1))).sum()
    plain = list(torch.autograd.grad(loss, list(module.parameters())))
    expected = explicit_scale(name, x, p, plain)
    for inside, scaled, right in zip(samples.combine(w), found.scale(plain), expected, strict=True):
        torch.testing.assert_close(inside, right)
        torch.testing.assert_close(scaled, right)
    for twice, again in zip(found.scale(plain, 2), found.scale(found.scale(plain)), strict=True):
        torch.testing.assert_close(twice, again)
    for back, original in zip(found.scale(found.scale(plain), -1), plain, strict=True):
        torch.testing.assert_close(back, original)


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
    K = found.of(layer).sample_gradients(found.inputs(x), found.outputs(p), others=B).gram(IDENTITY)
    torch.testing.assert_close(K, P @ P.T)


def test_moments_are_running_averages_without_bias_towards_the_start() -> None:
    layer = layer_of(nn.Linear(4, 3))
    state: dict[str, object] = {}
    batches = [(torch.randn(B, 4) * torch.rand(4), torch.randn(B, 3) * torch.rand(3)) for _ in range(5)]
    for x, p in batches:
        found = balanced(layer, x, p, state, ALONE)
    powers = torch.tensor([DECAY**k for k in range(5)][::-1])
    mean = (powers[:, None, None] * torch.stack([moments(p, -1) for _, p in batches])).sum(0) / powers.sum()
    logarithms = torch.stack([x.square().mean().log() for x, _ in batches])
    scale = ((powers * logarithms).sum() / powers.sum() / 2).exp()
    expected = inverse_root(mean, LOW) * scale
    torch.testing.assert_close(found.outputs(torch.eye(3)), expected, rtol=0.1, atol=0.1)  # up to `CHANGED`


@pytest.mark.parametrize("places", [DENSE, DENSE + 1])
def test_the_places_of_a_kernel_are_balanced_unless_there_are_too_many(places: int) -> None:
    module = nn.Conv1d(2, 3, places)
    x = torch.randn(B, 2, places + 10)
    state: dict[str, object] = {}
    balanced(layer_of(module), x, torch.randn_like(module(x)), state, ALONE)
    assert ("kernel_root" in state) == (places <= DENSE)


def test_silent_features_stay_bounded() -> None:
    layer = layer_of(nn.Linear(4, 3))
    x, p = torch.randn(B, 4), torch.randn(B, 3)
    x[:, 0], p[:, 0] = 0.0, 0.0
    found = balanced(layer, x, p, {}, ALONE)
    factors = found.scale([torch.ones(3, 4), torch.ones(3)])[0].abs()
    assert float(factors.max()) < 20 / (FLOOR * LOW) ** 0.25
    zero = balanced(layer, torch.zeros(B, 4), torch.zeros(B, 3), {}, ALONE)
    assert all(bool(part.isfinite().all()) for part in zero.scale([torch.ones(3, 4), torch.ones(3)]))


def test_leading_directions_of_wide_layers_give_the_root_of_the_whole_matrix() -> None:
    n, rank = 2 * DENSE, LEADING // 2
    mixing = torch.randn(rank, n)
    state: dict[str, object] = {}
    C, weight = torch.zeros(n, n), 0.0
    for _ in range(30):
        x = 3 * torch.randn(64, rank) @ mixing + torch.randn(64, n)
        observe(x, -1, state, "input", DECAY, ALONE)
        C, weight = DECAY * C + (1 - DECAY) * moments(x, -1), DECAY * weight + 1 - DECAY
    found, _ = root(state, "input", x, n, FLOOR, -0.25, 1.0)
    assert not found.dense
    values, Q = torch.linalg.eigh(C / weight)
    leading = Q[:, -rank:]
    exact = (values[-rank:] + FLOOR) ** -0.25
    torch.testing.assert_close(found.times(leading.T, -1), exact[:, None] * leading.T, rtol=0.05, atol=0.01)
    rest = float(found.kept["levels"][-1])
    assert rest == pytest.approx(float((values[:-LEADING].mean() + FLOOR) ** -0.25), rel=0.1)
    a = torch.randn(5, n)
    torch.testing.assert_close(found.times(found.times(a, -1), -1), found.times(a, -1, 2))
    torch.testing.assert_close(found.times(found.times(a, -1), -1, -1), a)
    torch.testing.assert_close(found.times(a.T, 0), found.times(a, -1).T)


def test_the_change_of_a_large_root_is_that_of_the_matrices() -> None:
    n, state, roots = 2 * DENSE, {}, []
    for k in range(3):
        observe(torch.randn(64, n) * torch.linspace(0.1, 1 + k, n), -1, state, "input", 0.5, ALONE)
        found, change = root(state, "input", torch.ones(1), n, FLOOR, -0.25, 1.0 + k)
        roots.append(found)
        state["input_root"] = found.kept
    squares = [found.times(torch.eye(n), -1, 2) / found.kept["factor"] ** 2 for found in roots[1:]]
    assert change == pytest.approx(float((squares[1] - squares[0]).norm() / squares[0].norm()), rel=1e-2)
    assert roots[-1].change_from(roots[-1]) == pytest.approx(0.0, abs=1e-3)


def test_looks_become_rarer_where_they_change_little_and_come_back_where_they_change() -> None:
    layer, state, seen = layer_of(nn.Linear(4, 3)), {}, []
    factors = torch.ones(4)
    for step in range(1, 401):
        if step == 200:
            factors = torch.tensor([1.0, 1.0, 10.0, 100.0])
        before = state.get("last_look", 0)
        balanced(layer, factors * torch.randn(512, 4), torch.randn(512, 3), state, ALONE)
        if state["last_look"] != before:
            seen.append(step)
    gaps = [b - a for a, b in pairwise(seen)]
    assert gaps[0] == 1
    assert max(gap for gap, at in zip(gaps, seen, strict=False) if at < 180) == LONGEST
    after = [gap for gap, at in zip(gaps, seen, strict=False) if 200 <= at < 300]
    assert min(after) <= LONGEST - REFRESH
    assert gaps[-1] == LONGEST


def test_a_state_without_the_time_of_the_last_look_keeps_its_averages() -> None:
    layer, state = layer_of(nn.Linear(4, 3)), {}
    for _ in range(100):
        balanced(layer, torch.randn(64, 4), torch.randn(64, 3), state, ALONE)
    before = state["input_moments"] / state["input_weight"]
    for name in ("last_look", "look_every"):
        del state[name]
    balanced(layer, torch.randn(64, 4) * torch.tensor([1.0, 1.0, 1.0, 9.0]), torch.randn(64, 3), state, ALONE)
    after = state["input_moments"] / state["input_weight"]
    assert float((after - before).norm() / before.norm()) < 0.2


@pytest.mark.parametrize("module", [nn.Linear(4, 3), nn.Linear(2 * DENSE, 3), nn.Conv2d(4, 3, 2)])
def test_a_step_held_by_a_curvature_solves_its_linear_system(module: nn.Linear | nn.Conv2d) -> None:
    """(1 / rate + c M^-1) step = M^-1 gradient."""
    layer, inputs = layer_of(module), module.weight.shape[1]
    x, p = (B, inputs), (B, 3)
    if isinstance(module, nn.Conv2d):
        x, p = (B, inputs, 5, 5), (B, 3, 4, 4)
    found = balanced(layer, torch.randn(x), torch.randn(p), {}, ALONE)
    u, rate, c = [torch.randn_like(module.weight), torch.randn(3)], 0.7, 0.3
    steps = [found.held_step(c * part, part.abs(), k, rate) for k, part in enumerate(u)]
    scaled, expected = found.scale(steps, 2), found.scale(u, 2)
    for step, of_step, right in zip(steps, scaled, expected, strict=True):
        torch.testing.assert_close(step / rate + c * of_step, c * right, rtol=1e-4, atol=1e-4)
