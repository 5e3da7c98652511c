"""The forward sweep repeats the same forward pass, whatever the network does in it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from optimizer_networks import Residual, distance, fcn, outer_step, same, twins, vectors, weights
from replay_networks import (
    CASES,
    EACH,
    loss_of,
    make,
    step,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ddpnopt import DDPNOpt
from ddpnopt.trace.norms import normalised, normalised_by, statistics

pytestmark = pytest.mark.filterwarnings("ignore::ddpnopt.OpenLoopWarning")


@EACH
@pytest.mark.parametrize("value", ["outer", "batch"])
def test_with_unchanged_weights_every_module_sees_the_same_in_all_passes(case: str, value: str) -> None:
    model, loss, _ = make(case)
    opt = DDPNOpt(model, lr=0.0, value=value, open_loop_lr=0.0, batch_dim=0)  # so nothing has to be found out
    passes: list[list[Tensor]] = []

    def remember(module: nn.Module, args: Any, output: Any) -> None:
        passes[-1].append(output.detach().clone())

    model.register_forward_pre_hook(lambda *_: passes.append([]))
    for module in model.modules():
        if not list(module.children()):
            module.register_forward_hook(remember)
    for _ in range(2):
        passes.clear()
        step(model, opt, loss)
        first, *more = passes
        assert more
        for again in more:
            assert len(first) == len(again)
            assert all(map(torch.equal, first, again))


@pytest.mark.parametrize("case", [case for case in CASES if case != "batch norm"])  # which couples the samples
def test_two_steps_equal_the_plain_reference(case: str) -> None:
    model, loss, chain = make(case)
    a, b = twins(model)
    opt = DDPNOpt(a, lr=0.8, value="outer")
    for seed in range(2):
        torch.manual_seed(seed)
        step(a, opt, loss)
        torch.manual_seed(seed)
        outer_step(b, loss, 0.8, chain=chain)
        assert distance(a, b) < 1e-12


@EACH
@pytest.mark.parametrize("value", ["outer", "batch"])
def test_random_stream_goes_on_as_without_a_second_pass(case: str, value: str) -> None:
    model, loss, _ = make(case)
    opt = DDPNOpt(model, lr=0.1, value=value)
    for seed in range(2):
        torch.manual_seed(seed)
        loss(model)
        expected = torch.rand(5)
        torch.manual_seed(seed)
        opt.zero_grad()
        loss(model).backward()
        between = torch.rand(2)
        opt.step()
        assert torch.equal(torch.cat([between, torch.rand(3)]), expected)


@pytest.mark.parametrize("value", ["outer", "batch"])
def test_batch_norm_statistics_are_updated_once(value: str) -> None:
    model, loss, _ = make("batch norm")
    opt = DDPNOpt(model, lr=0.1, value=value)
    for n in range(1, 4):
        opt.zero_grad()
        loss(model).backward()
        after_forward = [b.clone() for b in model.buffers()]
        opt.step()
        assert all(map(torch.equal, after_forward, model.buffers()))
        assert model[1].num_batches_tracked == n


def test_a_buffer_that_the_forward_pass_replaces_is_updated_once() -> None:
    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(6))

        def forward(self, x: Tensor) -> Tensor:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)  # a new tensor each time
            return x - self.mean

    model = nn.Sequential(nn.Linear(5, 6), Running(), nn.Tanh(), nn.Linear(6, 3))
    opt = DDPNOpt(model, lr=0.1, value="outer")
    x, y = vectors()
    opt.zero_grad()
    F.cross_entropy(model(x), y).backward()
    after_forward = model[1].mean.clone()
    opt.step()
    assert torch.equal(model[1].mean, after_forward)


@pytest.mark.parametrize("value", ["outer", "batch", "full"])
def test_in_place_activation_equals_out_of_place(value: str) -> None:
    def net(inplace: bool) -> nn.Sequential:
        torch.manual_seed(1)
        return nn.Sequential(
            nn.Linear(5, 8), nn.ReLU(inplace), nn.Linear(8, 6), nn.ELU(inplace=inplace), nn.Linear(6, 3)
        )

    models = net(True), net(False)
    for model in models:
        opt = DDPNOpt(model, lr=0.5, value=value)
        for _ in range(3):
            step(model, opt, loss_of(*vectors()))
    assert distance(*models) < 1e-13


@pytest.mark.parametrize("value", ["outer", "batch"])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_in_place_activation_after_a_convolution_on_constant_input(dims: int, value: str) -> None:
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    x = torch.randn(4, 2, *[4] * dims)

    def net(inplace: bool) -> nn.Sequential:
        torch.manual_seed(1)
        return nn.Sequential(conv(2, 3, 3), nn.ReLU(inplace), nn.Flatten(), nn.Linear(3 * 2**dims, 3))

    models = net(True), net(False)
    for model in models:
        opt = DDPNOpt(model, lr=0.5, value=value)
        for _ in range(2):
            step(model, opt, loss_of(x, vectors(4)[1]))
    assert same(*models)


class InPlaceResidual(Residual):
    """The sum and the activation in place: the state that the layers have read is overwritten."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        y = self.b(self.a(x).tanh_())
        y += x
        return self.last(y.relu_())


class OutOfPlaceResidual(Residual):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.last(torch.relu(x + self.b(torch.tanh(self.a(x)))))


@pytest.mark.parametrize("value", ["outer", "batch"])
def test_in_place_residual_sum_equals_out_of_place(value: str) -> None:
    torch.manual_seed(1)
    a = InPlaceResidual()
    torch.manual_seed(1)
    b = OutOfPlaceResidual()
    for model in (a, b):
        opt = DDPNOpt(model, lr=0.5, value=value)
        for _ in range(3):
            step(model, opt, loss_of(*vectors()))
    assert distance(a, b) < 1e-12


def error_of_step(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> str:
    """What one step says in its error, of torch or ours; nothing if it goes through."""
    try:
        step(model, DDPNOpt(model, lr=0.5, value="outer"), loss)
    except (RuntimeError, ValueError) as error:
        return str(error).replace("inplace", "in place")
    return ""


def test_an_input_overwritten_after_its_layer_has_read_it_is_never_taken_for_the_old_one() -> None:
    class Overwriting(nn.Module):
        def __init__(self, in_place: bool) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.a, self.b, self.c, self.in_place = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 3), in_place

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            y = self.b(x)
            x = x.mul_(2) if self.in_place else x * 2
            return self.c(torch.tanh(y + x))

    expected, model = Overwriting(False), Overwriting(True)
    step(expected, DDPNOpt(expected, lr=0.5, value="outer"), loss_of(*vectors()))
    error = error_of_step(model, loss_of(*vectors()))
    assert "in place" in error or (not error and distance(model, expected) < 1e-12)


def test_a_model_that_changes_its_own_input_is_never_replayed_on_the_changed_one() -> None:
    class Shifting(nn.Module):
        def __init__(self, in_place: bool) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.net, self.in_place = fcn(), in_place

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x.sub_(0.5) if self.in_place else x - 0.5)

    expected, model = Shifting(False), Shifting(True)
    x, y = vectors()
    step(expected, DDPNOpt(expected, lr=0.5, value="outer"), loss_of(x.clone(), y))
    error = error_of_step(model, loss_of(x.clone(), y))
    assert "in place" in error or (not error and distance(model, expected) < 1e-12)


def test_a_layer_that_the_second_pass_does_not_reach_is_not_skipped_in_silence() -> None:
    class Depth(nn.Module):
        """Stochastic depth with Python's own random numbers."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.a(x))
            if random.random() < 0.5:
                x = x + torch.tanh(self.b(x))
            return self.c(x)

    model = Depth()
    before = weights(model.b)
    random.seed(1)  # 0.13, 0.85, 0.76: layer b runs in the first pass only, if Python's stream is left alone
    error = error_of_step(model, loss_of(*vectors()))
    assert "'b'" in error or not any(map(torch.equal, before, model.b.parameters()))


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(x + self.norm(self.first(x)))


class _Counted(TorchDispatchMode):
    """Counts the layer norms that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.norms += func is torch.ops.aten.native_layer_norm.default
        return func(*args, **(kwargs or {}))


def test_the_second_forward_pass_normalises_once() -> None:
    model = _Residual()
    opt, (x, y) = DDPNOpt(model), (torch.randn(8, 6), torch.randint(4, (8,)))
    for _ in range(3):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with _Counted() as counted:
            opt.step()
    assert counted.norms == 1  # for the new input: autograd has kept the statistics of the recorded one
    assert "forward" not in vars(model.norm)


@pytest.mark.parametrize(("kind", "shape"), [(nn.BatchNorm2d, (6, 3, 4, 4)), (nn.BatchNorm1d, (6, 3))])
@pytest.mark.parametrize("train", [True, False])
def test_the_input_of_a_batch_norm_is_normalised_by_what_autograd_has_saved(
    kind: type[nn.Module], shape: tuple[int, ...], train: bool
) -> None:
    norm = kind(3).train(train)
    x = (7 + 2 * torch.randn(*shape)).requires_grad_()
    known = statistics(norm(x))
    assert (known is not None) == train
    if known is not None:
        assert torch.allclose(normalised_by(known, x.detach()), normalised(norm, x.detach()), atol=1e-12)


@pytest.mark.parametrize("features", [(4,), (3, 4)])
def test_the_input_of_a_layer_norm_is_normalised_by_what_autograd_has_saved(features: tuple[int, ...]) -> None:
    norm, x = nn.LayerNorm(features), (7 + 2 * torch.randn(6, 3, 4)).requires_grad_()
    known = statistics(norm(x))
    assert known is not None
    assert torch.allclose(normalised_by(known, x.detach()), normalised(norm, x.detach()), atol=1e-12)


def test_what_is_computed_again_in_the_backward_pass_is_not_asked_for_before() -> None:
    norm, x = nn.BatchNorm1d(3), torch.randn(6, 3, requires_grad=True)
    found = []

    def block(x: Tensor) -> Tensor:
        h: Tensor = norm(x)
        found.append(statistics(h))
        return h

    checkpoint(block, x, use_reentrant=False).sum().backward()
    assert set(found) == {None}
