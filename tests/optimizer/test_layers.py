"""Products with a layer's Jacobians and its samples' gradients agree with autograd, for any Linear or Conv."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from ddpnopt.curvature.kronecker import factors
from ddpnopt.ddp.output_metric import mixed_terms, output_metric
from ddpnopt.linear.layer import Layer
from ddpnopt.linear.linear import RankOne
from ddpnopt.linear.metric import IDENTITY, Metric
from ddpnopt.linear.sample_gradients import ByPlaces, Explicit, SampleGradients
from ddpnopt.trace.model_layers import describe

FEW = settings(
    max_examples=25,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
CLOSE = {"rtol": 1e-9, "atol": 1e-9}
METRICS = ["identity", "diagonal", "whitening", "rotated"]


@st.composite
def linears(draw: Any) -> tuple[nn.Module, Tensor]:
    n, m = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    tokens = draw(st.lists(st.integers(1, 4), max_size=2))
    module = nn.Linear(n, m, bias=draw(st.booleans()))
    return module, torch.randn(draw(st.integers(1, 4)), *tokens, n)


@st.composite
def convolutions(draw: Any) -> tuple[nn.Module, Tensor]:
    dims = draw(st.integers(1, 3))
    groups = draw(st.sampled_from([1, 1, 2]))
    kernel = [draw(st.integers(1, 3 if dims < 3 else 2)) for _ in range(dims)]
    mode = draw(st.sampled_from(["zeros", "zeros", "reflect", "circular", "replicate"]))
    padding = draw(st.sampled_from(["same", "valid", None, None]))
    stride = [1] * dims if padding == "same" else [draw(st.integers(1, 2)) for _ in range(dims)]
    dilation = [draw(st.integers(1, 2)) for _ in range(dims)]
    sizes = [draw(st.integers(3, 5 if dims < 3 else 4)) for _ in range(dims)]
    pads = [draw(st.integers(0, 2)) for _ in range(dims)] if padding is None else padding
    assume(all(r * (k - 1) < s for r, k, s in zip(dilation, kernel, sizes, strict=True)))
    module = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](
        groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2)), tuple(kernel), tuple(stride),
        pads if isinstance(pads, str) else tuple(pads), tuple(dilation), groups, draw(st.booleans()), mode,
    )  # fmt: skip
    return module, torch.randn(draw(st.integers(1, 3)), module.in_channels, *sizes)


def cheapest(layer: Layer, x: Tensor, p: Tensor) -> SampleGradients:
    return layer.sample_gradients(x, p)


CASES = st.one_of(linears(), convolutions())


def layer_of(module: nn.Module) -> Layer:
    layer = describe(module)
    assert layer is not None
    return layer


def parts(module: nn.Module) -> list[Tensor]:
    return [p.detach() for p in module.parameters()]


def run(module: nn.Module, u: list[Tensor], x: Tensor) -> Tensor:
    return functional_call(module, dict(zip(dict(module.named_parameters()), u, strict=True)), (x,))


def flat(u: list[Tensor], lead: int = 0) -> Tensor:
    return torch.cat([p.flatten(lead) for p in u], lead)


def per_sample(module: nn.Module, x: Tensor, v: Tensor) -> Tensor:
    """Gradients of each sample, (B, parameters), through torch.func."""

    def one(x: Tensor, v: Tensor) -> list[Tensor]:
        return torch.func.grad(lambda u: (run(module, u, x[None])[0] * v).sum())(parts(module))

    return flat(vmap(one)(x, v), 1)


def metric_and_inverse(layer: Layer, module: nn.Module, kind: str) -> tuple[Metric, Tensor]:
    """A metric, and its M^-1 as a dense matrix on the flat parameters, built entry by entry of the joint form."""
    u = parts(module)
    n = sum(p.numel() for p in u)
    if kind == "identity":
        return IDENTITY, torch.eye(n)
    if kind == "diagonal":
        D = [torch.rand_like(p) + 0.1 for p in u]
        return Metric(D=D), torch.diag(flat(D))
    g, O, J = layer.joint_shape
    if kind == "whitening":
        T_A, T_G, D = torch.randn(g, J, J), torch.randn(g, O, O), torch.ones(g, O, J)
        metric = Metric(T_A=T_A, T_G=T_G)
    else:
        T_A, T_G = torch.linalg.qr(torch.randn(g, J, J))[0], torch.linalg.qr(torch.randn(g, O, O))[0]
        D = torch.rand(g, O, J) + 0.1
        metric = Metric(T_A=T_A, T_G=T_G, D=[D])
    blocks = []
    for k in range(g):
        T = torch.kron(T_G[k], T_A[k])
        blocks.append(T.T @ torch.diag(D[k].flatten()) @ T)
    joint = torch.block_diag(*blocks)
    order = joint_order(layer, u)
    return metric, joint[order][:, order]


def joint_order(layer: Layer, u: list[Tensor]) -> Tensor:
    """Where each flat parameter stands in the joint form, weights of output o of group k in row (k, o), bias last."""
    g, O, J = layer.joint_shape
    weight = torch.arange(g * O)[:, None] * J + torch.arange(u[0][0].numel())
    if len(u) == 1:
        return weight.flatten()
    return torch.cat([weight.flatten(), torch.arange(g * O) * J + J - 1])


# -- the layer ---------------------------------------------------------------------------------------------------------


@FEW
@given(CASES)
def test_apply_is_the_module(case: tuple[nn.Module, Tensor]) -> None:
    module, x = case
    torch.testing.assert_close(layer_of(module).apply(x, parts(module)), module(x).detach(), **CLOSE)


@FEW
@given(CASES)
def test_gradients_of_weights_and_inputs_are_those_of_autograd(case: tuple[nn.Module, Tensor]) -> None:
    module, x = case
    layer = layer_of(module)
    x.requires_grad_()
    h = module(x)
    v = torch.randn_like(h)
    x_grad, *grads = torch.autograd.grad(h, [x, *module.parameters()], v)
    x = x.detach()
    for ours, theirs in zip(layer.grad(x, v), grads, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)
    torch.testing.assert_close(layer.input_grad(v, module.weight.detach(), x.shape), x_grad, **CLOSE)


@FEW
@given(CASES)
def test_column_form_times_joint_form_is_the_output(case: tuple[nn.Module, Tensor]) -> None:
    module, x = case
    layer = layer_of(module)
    h = module(x).detach()
    columns = torch.einsum("bpgj,goj->bpgo", layer.augmented(x), layer.join(parts(module)))
    torch.testing.assert_close(layer.rows(h), columns, **CLOSE)
    assert torch.equal(layer.unrows(layer.rows(h)), h.flatten(1))
    assert all(map(torch.equal, layer.split(layer.join(parts(module))), parts(module)))


@FEW
@given(CASES)
def test_kronecker_factors_are_averages_of_outer_products(case: tuple[nn.Module, Tensor]) -> None:
    module, x = case
    layer = layer_of(module)
    v = torch.randn_like(module(x).detach())
    A, G = factors(layer, x, v)
    X, V = layer.augmented(x), layer.rows(v)
    B, P, g = X.shape[:3]
    for k in range(g):
        A_k = sum(torch.outer(X[i, p, k], X[i, p, k]) for i in range(B) for p in range(P)) / (B * P)
        G_k = sum(torch.outer(V[i, p, k], V[i, p, k]) for i in range(B) for p in range(P)) / B
        torch.testing.assert_close(A[k], A_k, **CLOSE)
        torch.testing.assert_close(G[k], G_k, **CLOSE)


@FEW
@given(convolutions())
def test_in_another_basis_of_its_kernel_a_convolution_has_the_products_of_those_weights(
    case: tuple[nn.Module, Tensor],
) -> None:
    module, x = case
    layer, K = layer_of(module), module.weight[0, 0].numel()
    assume(K > 1)
    basis = torch.randn(K, K)
    other, (weight, *bias) = layer.in_basis(basis), parts(module)
    same = (weight.flatten(2) @ basis).view_as(weight)  # the weights that those in the basis stand for
    h = layer.apply(x, [same, *bias])
    torch.testing.assert_close(other.apply(x, [weight, *bias]), h, **CLOSE)
    v = torch.randn_like(h)
    torch.testing.assert_close(other.input_grad(v, weight, x.shape), layer.input_grad(v, same, x.shape), **CLOSE)
    wanted = [(layer.grad(x, v)[0].flatten(2) @ basis.T).view_as(weight), *layer.grad(x, v)[1:]]
    for ours, theirs in zip(other.grad(x, v), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)
    each = other.sample_grads(x, v)
    torch.testing.assert_close(each.sum(0).reshape(weight.shape), wanted[0], **CLOSE)
    columns = torch.einsum("bpgo,bpgj->bgoj", other.rows(v), other.patches(x))
    torch.testing.assert_close(columns, each, **CLOSE)


# -- the metric --------------------------------------------------------------------------------------------------------


@FEW
@given(CASES, st.sampled_from(METRICS))
def test_solve_is_the_dense_inverse(case: tuple[nn.Module, Tensor], kind: str) -> None:
    module, _ = case
    layer = layer_of(module)
    metric, inverse = metric_and_inverse(layer, module, kind)
    u = [torch.randn_like(p) for p in parts(module)]
    torch.testing.assert_close(flat(metric.solve(layer, u)), inverse @ flat(u), **CLOSE)


@FEW
@given(CASES, st.sampled_from(METRICS))
def test_output_metric_is_the_dense_product(case: tuple[nn.Module, Tensor], kind: str) -> None:
    module, x = case
    layer = layer_of(module)
    metric, inverse = metric_and_inverse(layer, module, kind)
    N = output_metric(layer, x, metric)
    if N.dim() == 2:  # a diagonal, or one number for all of it
        N = torch.diag_embed(N.expand(len(x), module(x)[0].numel()))
    for i in range(len(x)):
        jacobian = jacrev(lambda u, i=i: run(module, u, x[i : i + 1]).flatten())(parts(module))
        J = flat(jacobian, 1)
        torch.testing.assert_close(N[i], J @ inverse @ J.T, **CLOSE)


@FEW
@given(CASES, st.sampled_from(METRICS))
def test_mixed_terms_are_the_dense_products(case: tuple[nn.Module, Tensor], kind: str) -> None:
    module, x = case
    layer = layer_of(module)
    metric, inverse = metric_and_inverse(layer, module, kind)
    V = torch.randn_like(module(x).detach())
    NE, EE = mixed_terms(layer, x, V, metric)
    for i in range(len(x)):
        u = parts(module)

        def q_u(x: Tensor, i: int = i, u: list[Tensor] = u) -> list[Tensor]:
            return torch.func.grad(lambda u: (run(module, u, x[None])[0] * V[i]).sum())(u)

        E = torch.cat([e.reshape(-1, x[i].numel()) for e in jacrev(q_u)(x[i])])  # (parameters, n_x)
        J = flat(jacrev(lambda u, i=i: run(module, u, x[i : i + 1]).flatten())(u), 1)
        torch.testing.assert_close(NE[i], J @ inverse @ E, **CLOSE)
        torch.testing.assert_close(EE[i], E.T @ inverse @ E, **CLOSE)


# -- gradients of the samples ------------------------------------------------------------------------------------------


@FEW
@given(CASES, st.sampled_from(METRICS), st.sampled_from([RankOne, Explicit, ByPlaces, cheapest]))
def test_sample_gradients_agree_with_explicit_ones(case: tuple[nn.Module, Tensor], kind: str, form: Any) -> None:
    module, x = case
    assume(form is not RankOne or x.dim() == 2)
    check_sample_gradients(module, x, kind, form)


@pytest.mark.parametrize("kind", METRICS)
@pytest.mark.parametrize("form", [RankOne, Explicit, ByPlaces, cheapest])
@FEW
@given(case=linears())
def test_every_form_agrees_on_linear_layers(case: tuple[nn.Module, Tensor], kind: str, form: Any) -> None:
    module, x = case
    if form is RankOne:
        x = x.reshape(-1, x.shape[-1])
    check_sample_gradients(module, x, kind, form)


def check_sample_gradients(module: nn.Module, x: Tensor, kind: str, form: Any) -> None:
    layer = layer_of(module)
    metric, inverse = metric_and_inverse(layer, module, kind)
    h = module(x).detach()
    p, other = torch.randn_like(h), torch.randn_like(h)
    P, Q = per_sample(module, x, p), per_sample(module, x, other)
    w = torch.randn(len(x))
    ours = form(layer, x, p)
    torch.testing.assert_close(ours.dots(metric), (P @ inverse * P).sum(1), **CLOSE)
    torch.testing.assert_close(ours.dots(metric, other), (P @ inverse * Q).sum(1), **CLOSE)
    torch.testing.assert_close(ours.gram(metric), P @ inverse @ P.T, **CLOSE)
    torch.testing.assert_close(flat(ours.combine(w)), w @ P, **CLOSE)


@pytest.mark.parametrize("chunk", [1, 7])
@pytest.mark.parametrize("kind", METRICS)
@pytest.mark.parametrize(("form", "tokens"), [(RankOne, ()), (ByPlaces, (3,)), (Explicit, (3,))])
def test_gram_matrices_in_chunks_are_the_same(
    form: Any, tokens: tuple[int, ...], kind: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddpnopt.linear.linear.CHUNK", chunk)
    monkeypatch.setattr("ddpnopt.linear.sample_gradients.CHUNK", chunk)
    check_sample_gradients(nn.Linear(4, 5), torch.randn(6, *tokens, 4), kind, form)


def test_the_cheapest_form_is_chosen() -> None:
    layer = layer_of(nn.Linear(30, 40))
    assert isinstance(layer.sample_gradients(torch.randn(2, 30), torch.randn(2, 40)), RankOne)
    assert isinstance(layer.sample_gradients(torch.randn(2, 3, 30), torch.randn(2, 3, 40)), ByPlaces)
    assert isinstance(layer.sample_gradients(torch.randn(2, 90, 30), torch.randn(2, 90, 40)), Explicit)


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_a_frozen_half_of_a_layer_is_left_out(frozen: str) -> None:
    module = nn.Linear(3, 2)
    getattr(module, frozen).requires_grad_(False)
    layer = describe(module)
    if frozen == "weight":
        assert layer is None
    else:
        assert layer is not None
        assert layer.joint_shape == (1, 2, 3)


def test_a_subclass_with_a_forward_of_its_own_is_not_taken_for_a_plain_layer() -> None:
    class Scaled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    assert describe(Scaled(3, 2)) is None
    assert describe(type("Named", (nn.Linear,), {})(3, 2)) is not None
