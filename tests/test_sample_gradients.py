"""Gradients of single samples, in every memory order and however the work is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ddpnopt import DDPNOpt
from ddpnopt.linear import convolution
from ddpnopt.linear import sample_gradients as gradients
from ddpnopt.linear.convolution import Conv
from ddpnopt.linear.layer import Layer
from ddpnopt.linear.linear import Linear, RankOne
from ddpnopt.linear.metric import Metric


@st.composite
def convolutions(draw: st.DrawFn) -> Conv:
    dims, groups = draw(st.integers(1, 3)), draw(st.integers(1, 2))

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(dims))

    shape = (groups * draw(st.integers(1, 3)), draw(st.integers(1, 3)), *each(1, 3))
    return Conv(shape, False, groups, each(1, 2), each(1, 2), each(0, 2))


def _draw(*shape: int, channels_last: bool) -> Tensor:
    drawn = torch.randn(*shape, dtype=torch.float64)
    return drawn.movedim(1, -1).contiguous().movedim(-1, 1) if channels_last else drawn


@settings(max_examples=60, deadline=None)
@given(layer=convolutions(), last_x=st.booleans(), last_v=st.booleans(), cached=st.sampled_from([1, 500, 10**6]))
def test_sample_gradients_of_a_convolution_are_those_of_its_patches(
    layer: Conv, last_x: bool, last_v: bool, cached: int
) -> None:
    x = _draw(3, layer.groups * layer.weight_shape[1], *(7 - d for d in range(len(layer.stride))), channels_last=last_x)
    h = layer.apply(x, [torch.zeros(layer.weight_shape, dtype=torch.float64)])
    v = _draw(*h.shape, channels_last=last_v)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convolution, "CACHED", cached)
        found = layer.sample_grads(x, v)
    torch.testing.assert_close(found, Layer.sample_grads(layer, x, v), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shape", [(16, 16, 3, 3), (32, 8, 5, 5), (12, 3, 3, 1)])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
@pytest.mark.parametrize("mode", ["zeros", "reflect"])
def test_sample_gradients_by_a_grouped_convolution_are_those_of_the_patches(
    shape: tuple[int, ...], stride: int, last: bool, mode: str
) -> None:
    pads = {"padding": (0, 0), "pad_first": (1, 1, 1, 1), "pad_mode": "reflect"} if mode == "reflect" else {}
    layer = Conv(shape, True, 1, (stride, stride), (1, 1), **{"padding": (1, 0), **pads})  # type: ignore[arg-type]
    x = _draw(5, shape[1], 9, 8, channels_last=last).float()
    h = layer.apply(x, [torch.zeros(shape)])
    v = _draw(*h.shape, channels_last=last).float()
    assert layer._is_grouped_faster(x, v) == (shape[1] % convolution.BLOCK == 0)
    expected = Layer.sample_grads(layer, x.double(), v.double())
    torch.testing.assert_close(layer.sample_grads(x, v), expected.float(), rtol=1e-4, atol=1e-4)


class Tokens(nn.Module):
    """Attention's kind of layer: the same weights at every place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))).mean(1)


class Residual(nn.Module):
    """No chain: a layer whose input does not show the whole state."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inside, self.last = nn.Conv2d(2, 3, 3), nn.Conv2d(3, 3, 3, padding=1), nn.Linear(48, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.last((x + torch.tanh(self.inside(x))).flatten(1))


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Conv2d(3, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(27, 3))


@pytest.mark.parametrize("curvature", ["identity", "rmsprop", "kfac", "ekfac"])
@pytest.mark.parametrize("value", ["batch", "outer"])
@pytest.mark.parametrize("kind", ["convolutions", "tokens", "residual"])
@pytest.mark.parametrize("written", [2**20, 40])
def test_recomputing_gives_the_same_weights_as_keeping(
    kind: str, value: str, curvature: str, written: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradients, "TEMPORARY", written)  # all outputs of a layer at a time, or one
    found = []
    for recompute in (False, True, None):
        torch.manual_seed(0)
        model = {"convolutions": convolutional, "tokens": Tokens, "residual": Residual}[kind]().double()
        options: dict[str, Any] = {"value": value, "curvature": curvature, "recompute": recompute}
        opt = DDPNOpt(model, 0.1, **options)
        for _ in range(3):
            x = torch.randn(5, 7, 4) if kind == "tokens" else torch.randn(5, 2, 6, 6)
            F.cross_entropy(model(x.double()), torch.randint(3, (5,))).backward()
            opt.step()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, rtol=1e-9, atol=1e-11)


def test_a_weight_that_changes_its_precision_is_still_copied_away() -> None:
    model = nn.Linear(3, 2)
    opt = DDPNOpt(model)
    for dtype in (torch.float32, torch.float64):
        model.to(dtype)
        F.cross_entropy(model(torch.randn(4, 3, dtype=dtype)), torch.tensor([0, 1, 1, 0])).backward()
        opt.step()
    assert model.weight.dtype == torch.float64


@pytest.mark.parametrize("samples", [2, 40])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("diagonal", [False, True])
def test_the_metric_on_the_factors_of_gradients_is_that_on_their_sum(samples: int, bias: bool, diagonal: bool) -> None:
    torch.manual_seed(0)
    layer = Linear((6, 9), bias)
    _, O, J = layer.joint_shape
    T_A, T_G, D = (torch.randn(1, *shape, dtype=torch.float64) for shape in ((J, J), (O, O), (O, J)))
    metric = Metric(T_A=T_A, T_G=T_G, D=[D.exp()] if diagonal else None)
    x, p, w = (torch.randn(samples, *shape, dtype=torch.float64) for shape in ((9,), (6,), ()))
    found = RankOne(layer, x, p).solved(w, metric)
    wanted = metric.solve(layer, layer.grad(x, w[:, None] * p))
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("samples", "places"), [(7, 3), (130, 4), (61, 9)])
def test_inner_products_over_places_are_those_of_explicit_gradients(samples: int, places: int) -> None:
    layer = Linear((6, 5), True)
    x, p = (torch.randn(samples, places, n, dtype=torch.float64) for n in (5, 6))
    found = gradients.ByPlaces(layer, x, p).gram(Metric())
    torch.testing.assert_close(found, gradients.Explicit(layer, x, p).gram(Metric()), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("padded", ["zeros", "circular"])
def test_sample_gradients_of_a_depthwise_convolution_are_those_of_its_patches(stride: int, padded: str) -> None:
    padding = {"zeros": {"padding": (1, 1)}, "circular": {"padding": (0, 0), "pad_first": (1, 1, 1, 1)}}[padded]
    layer = Conv((6, 1, 3, 3), False, 6, (stride, stride), (1, 1), **padding)  # type: ignore[arg-type]
    x = torch.randn(4, 6, 8, 8)
    v = torch.randn_like(layer.apply(x, [torch.zeros(6, 1, 3, 3)]))
    torch.testing.assert_close(layer.sample_grads(x, v), Layer.sample_grads(layer, x, v), rtol=1e-4, atol=1e-4)
