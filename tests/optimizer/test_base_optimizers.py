"""Without feedback it is the base optimizer, step for step: SGD, RMSprop, Adam, KFAC, EKFAC."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from optimizer_networks import batches, cnn, distance, fcn, images, train, twins, vectors, weights
from torch import Tensor, nn

from ddpnopt import EKFAC, KFAC, Adam, DDPNOpt, RMSprop

NETS = {"fcn": (fcn, vectors), "cnn": (cnn, images)}
EACH_NET = pytest.mark.parametrize("net", NETS)


# -- beside torch ------------------------------------------------------------------------------------------------------


@EACH_NET
@pytest.mark.parametrize(
    ("options", "reference"),
    [
        ({"lr": 0.1}, lambda p: torch.optim.SGD(p, 0.1)),
        (
            {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3},
            lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=1e-3),
        ),
        ({"lr": 0.01, "curvature": "rmsprop"}, lambda p: torch.optim.RMSprop(p, 0.01)),
        (
            {"lr": 0.01, "curvature": RMSprop(alpha=0.9, eps=1e-4), "momentum": 0.9, "weight_decay": 1e-3},
            lambda p: torch.optim.RMSprop(p, 0.01, alpha=0.9, eps=1e-4, momentum=0.9, weight_decay=1e-3),
        ),
        ({"lr": 0.01, "curvature": "adam"}, lambda p: torch.optim.Adam(p, 0.01)),
        (
            {"lr": 0.01, "curvature": Adam(betas=(0.8, 0.9), eps=1e-4), "weight_decay": 1e-3},
            lambda p: torch.optim.Adam(p, 0.01, betas=(0.8, 0.9), eps=1e-4, weight_decay=1e-3),
        ),
    ],
    ids=["sgd", "sgd, momentum, decay", "rmsprop", "rmsprop, momentum, decay", "adam", "adam, decay"],
)
def test_fifty_steps_beside_torch(net: str, options: dict[str, Any], reference: Callable[[Any], Any]) -> None:
    build, data = NETS[net]
    a, b = twins(build())
    start = weights(a)
    train(a, DDPNOpt(a, feedback=False, **options), data, 50)
    train(b, reference(b.parameters()), data, 50)
    assert distance(a, b) < 1e-10
    assert distance(a, start) > 1e-2


@pytest.mark.parametrize("set_to_none", [True, False])
def test_momentum_does_not_depend_on_how_gradients_are_zeroed(set_to_none: bool) -> None:
    a, b = twins(fcn())
    opts = DDPNOpt(a, 0.1, feedback=False, momentum=0.9), torch.optim.SGD(b.parameters(), 0.1, momentum=0.9)
    for x, y in batches(vectors, 5):
        for model, opt in zip((a, b), opts, strict=True):
            opt.zero_grad(set_to_none=set_to_none)
            F.cross_entropy(model(x), y).backward()
            opt.step()
    assert distance(a, b) < 1e-13


def test_gradients_accumulated_without_feedback_are_used_as_torch_does() -> None:
    a, b = twins(fcn())
    for model, opt in (
        (a, DDPNOpt(a, 0.1, feedback=False, momentum=0.9)),
        (b, torch.optim.SGD(b.parameters(), 0.1, momentum=0.9)),
    ):
        for _ in range(3):
            opt.zero_grad()
            for x, y in batches(vectors, 2):
                F.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            opt.step()
    assert distance(a, b) < 1e-13


# -- KFAC and EKFAC in dense matrices ----------------------------------------------------------------------------------


class Dense:
    """KFAC and EKFAC from their papers: Kronecker products formed, matrices inverted, one layer at a time.

    Weights as vec of the (outputs, inputs + 1) matrix, row by row: the curvature is then G (x) A.
    """

    def __init__(
        self, model: nn.Module, lr: float, momentum: float, weight_decay: float, damping: float, refresh: int,
        decay: float,
    ) -> None:  # fmt: skip
        self.layers = [m for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self.damping, self.refresh, self.decay = damping, refresh, decay
        self.x: dict[nn.Module, Tensor] = {}
        self.v: dict[nn.Module, Tensor] = {}
        self.state: dict[nn.Module, dict[str, Any]] = {layer: {"n": 0} for layer in self.layers}
        for layer in self.layers:
            layer.register_forward_hook(self._see)

    def _see(self, layer: nn.Module, args: tuple[Tensor, ...], h: Tensor) -> None:
        self.x[layer] = args[0].detach()
        h.register_hook(lambda grad: self.v.__setitem__(layer, grad))

    def zero_grad(self) -> None:
        for layer in self.layers:
            layer.weight.grad = layer.bias.grad = None

    def _factors(self, layer: nn.Module) -> tuple[Tensor, Tensor]:
        x, v = self.x[layer], self.v[layer]
        B = len(x)
        if isinstance(layer, nn.Conv2d):
            x = F.unfold(x, layer.kernel_size, padding=layer.padding, stride=layer.stride).transpose(1, 2)
            v = v.flatten(2).transpose(1, 2)
        else:
            x, v = x[:, None], v[:, None]
        x = torch.cat([x, torch.ones_like(x[..., :1])], 2)
        places = [(x[i, p], B * v[i, p]) for i in range(B) for p in range(x.shape[1])]
        A = sum(torch.outer(x, x) for x, _ in places) / len(places)
        G = sum(torch.outer(v, v) for _, v in places) / B
        return A, G

    @torch.no_grad()
    def step(self) -> None:
        for layer in self.layers:
            u = torch.cat([layer.weight.flatten(1), layer.bias[:, None]], 1)
            g = torch.cat([layer.weight.grad.flatten(1), layer.bias.grad[:, None]], 1)
            state = self.state[layer]
            step = (self.inverse(state, layer, g) @ (g + self.weight_decay * u).flatten()).view_as(g)
            state["n"] += 1
            if self.momentum:
                step = state["buffer"] = self.momentum * state["buffer"] + step if "buffer" in state else step
            u = u - self.lr * step
            layer.weight.copy_(u[:, :-1].reshape(layer.weight.shape))
            layer.bias.copy_(u[:, -1])

    def inverse(self, state: dict[str, Any], layer: nn.Module, g: Tensor) -> Tensor:
        raise NotImplementedError


class DenseKFAC(Dense):
    def inverse(self, state: dict[str, Any], layer: nn.Module, g: Tensor) -> Tensor:
        if state["n"] % self.refresh == 0:
            A, G = self._factors(layer)
            k = state["n"] // self.refresh + 1
            weight = 1 - min(1 - 1 / k, self.decay)
            if k > 1:
                A, G = (1 - weight) * state["A"] + weight * A, (1 - weight) * state["G"] + weight * G
            state["A"], state["G"] = A, G
            pi = ((A.trace() / len(A)) / (G.trace() / len(G))).sqrt()
            A = A + pi * self.damping**0.5 * torch.eye(len(A))
            G = G + self.damping**0.5 / pi * torch.eye(len(G))
            state["inverse"] = torch.linalg.inv(torch.kron(G, A))
        return state["inverse"]


class DenseEKFAC(Dense):
    def inverse(self, state: dict[str, Any], layer: nn.Module, g: Tensor) -> Tensor:
        B = len(self.x[layer])
        if state["n"] % self.refresh == 0:
            A, G = self._factors(layer)
            (a, U_A), (b, U_G) = torch.linalg.eigh(A), torch.linalg.eigh(G)
            state["U"] = torch.kron(U_G, U_A)
            state["m2"] = torch.kron(b.clamp_min(0), a.clamp_min(0))
        rotated = state["U"].T @ g.flatten()
        state["m2"] = self.decay * state["m2"] + (1 - self.decay) * B * rotated**2
        return state["U"] @ torch.diag(1 / (state["m2"] + self.damping)) @ state["U"].T


@EACH_NET
@pytest.mark.parametrize("refresh", [1, 5])
@pytest.mark.parametrize(("momentum", "weight_decay"), [(0.0, 0.0), (0.9, 1e-2)])
@pytest.mark.parametrize(
    ("ours", "theirs", "settings", "lr"),
    [
        (KFAC, DenseKFAC, {"damping": 0.03, "decay": 0.8}, 0.05),
        (EKFAC, DenseEKFAC, {"damping": 0.1, "decay": 0.6}, 0.05),
    ],
    ids=["kfac", "ekfac"],
)
def test_fifteen_steps_beside_dense_kronecker_methods(
    ours: Any, theirs: Any, settings: dict[str, float], lr: float, momentum: float, weight_decay: float, refresh: int,
    net: str,
) -> None:  # fmt: skip
    build, data = NETS[net]
    a, b = twins(build())
    start = weights(a)
    curvature = ours(refresh=refresh, **settings)
    opt = DDPNOpt(a, lr, feedback=False, curvature=curvature, momentum=momentum, weight_decay=weight_decay)
    reference = theirs(b, lr, momentum, weight_decay, refresh=refresh, **settings)
    for x, y in batches(partial(data, n=20), 15):  # more samples than inputs: else the eigenbases are not unique
        for model, o in ((a, opt), (b, reference)):
            o.zero_grad()
            F.cross_entropy(model(x), y).backward()
            o.step()
        assert distance(a, b) < 1e-8
    assert distance(a, start) > 1e-2


@pytest.mark.parametrize("curvature", [KFAC(refresh=2), EKFAC(refresh=2)], ids=["kfac", "ekfac"])
def test_a_sum_over_the_batch_with_the_lr_divided_by_it_is_the_mean(curvature: Any) -> None:
    a, b = twins(fcn())
    opt_a = DDPNOpt(a, 0.08, feedback=False, curvature=curvature)
    opt_b = DDPNOpt(b, 0.01, feedback=False, curvature=curvature, reduction="sum")
    for x, y in batches(vectors, 5):  # of 8 samples
        for model, opt, reduction in ((a, opt_a, "mean"), (b, opt_b, "sum")):
            opt.zero_grad()
            F.cross_entropy(model(x), y, reduction=reduction).backward()
            opt.step()
    assert distance(a, b) < 1e-12


@pytest.mark.parametrize("curvature", [KFAC(), EKFAC()], ids=["kfac", "ekfac"])
def test_defaults_are_those_of_the_documentation(curvature: Any) -> None:
    name = type(curvature).__name__.lower()
    a, b = twins(fcn())
    train(a, DDPNOpt(a, 0.01, feedback=False, curvature=name), vectors, 12)
    train(b, DDPNOpt(b, 0.01, feedback=False, curvature=curvature), vectors, 12)
    assert distance(a, b) == 0
    assert (curvature.damping, curvature.decay) == ((0.01, 0.95) if name == "kfac" else (0.03, 0.75))


@pytest.mark.parametrize("curvature", ["identity", "rmsprop", "adam", "kfac", "ekfac"])
@pytest.mark.parametrize("value", ["outer", "batch", "full"])
def test_with_feedback_the_steps_are_others(curvature: str, value: str) -> None:
    a, b = twins(fcn())
    lr = 0.01 if curvature in ("rmsprop", "adam") else 0.5
    train(a, DDPNOpt(a, lr, curvature=curvature, value=value), vectors, 2)
    train(b, DDPNOpt(b, lr, curvature=curvature, feedback=False), vectors, 2)
    assert distance(a, b) > 1e-6
