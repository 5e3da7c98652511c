"""Gradient accumulation: micro-batches with loss / N and one step() equal one step on the whole batch."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from optimizer_networks import Residual, cnn, distance, fcn, images, same, twins, vectors, weights
from torch import Tensor, nn

from ddpnopt import DDPNOpt, ModelError, OpenLoopWarning

NETS: dict[str, Any] = {"fcn": (fcn, vectors), "cnn": (cnn, images), "residual": (Residual, vectors)}


def micro_steps(model: nn.Module, opt: DDPNOpt, data: Any, sizes: list[int], steps: int = 2) -> None:
    """The loss of the whole batch, in shares."""
    for seed in range(steps):
        x, y = data(sum(sizes), seed=seed)
        opt.zero_grad()
        for some, labels in zip(x.split(sizes), y.split(sizes), strict=True):
            (F.cross_entropy(model(some), labels) * (len(some) / len(x))).backward()
        opt.step()


CASES = [
    ("fcn", {"value": "outer", "lr": 0.5}),
    ("fcn", {"value": "full", "lr": 0.5}),
    ("fcn", {"value": "full", "lr": 0.5, "order": 2, "terminal": "cross_entropy"}),
    ("fcn", {"value": "batch"}),
    ("fcn", {"value": "batch", "terminal": "cross_entropy", "weight_decay": 0.01}),
    ("fcn", {"value": "outer", "lr": 0.02, "curvature": "adam"}),
    ("fcn", {"value": "full", "lr": 0.05, "curvature": "kfac", "momentum": 0.5}),
    ("fcn", {"value": "batch", "curvature": "ekfac"}),
    ("fcn", {"value": "outer", "lr": 0.05, "curvature": "kfac", "feedback": False}),
    ("cnn", {"value": "outer", "lr": 0.3}),
    ("cnn", {"value": "full", "lr": 0.1}),
    ("cnn", {"value": "batch", "curvature": "rmsprop", "lr": 0.01}),
    ("residual", {"value": "outer", "lr": 0.5}),
    ("residual", {"value": "batch"}),
    ("residual", {"value": "outer", "lr": 0.5, "closed_loop": False}),
]


@pytest.mark.parametrize(("net", "options"), CASES)
@pytest.mark.parametrize("sizes", [[4, 4], [3, 1, 4]])
def test_micro_batches_equal_the_whole_batch(net: str, options: dict[str, Any], sizes: list[int]) -> None:
    make, data = NETS[net]
    a, b = twins(make())
    before = weights(a)
    micro_steps(a, DDPNOpt(a, **options), data, [8])
    micro_steps(b, DDPNOpt(b, **options), data, sizes)
    assert distance(a, b) < 1e-9
    assert distance(a, before) > 1e-3


def test_one_backward_pass_through_two_forward_passes_is_accumulation_too() -> None:
    a, b = twins(fcn())
    x, y = vectors(8)
    micro_steps(a, DDPNOpt(a), vectors, [4, 4], steps=1)
    opt = DDPNOpt(b)
    (0.5 * F.cross_entropy(b(x[:4]), y[:4]) + 0.5 * F.cross_entropy(b(x[4:]), y[4:])).backward()
    opt.step()
    assert distance(a, b) < 1e-9


def test_parameters_without_feedback_accumulate_as_in_torch() -> None:
    def normed() -> nn.Sequential:
        return nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.PReLU(), nn.Linear(6, 3))

    a, b = twins(normed())
    for model, sizes in ((a, [8]), (b, [4, 2, 2])):
        with pytest.warns(UserWarning, match=r"2\.weight"):
            micro_steps(model, DDPNOpt(model, exclude=["2"]), vectors, sizes)
    assert distance(a, b) < 1e-9


class Noisy(nn.Module):
    """Notes what dropout has let through, and how often."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 20), nn.Linear(20, 3)
        self.norm = nn.BatchNorm1d(20, affine=False)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(torch.tanh(self.norm(self.a(x))), 0.5, self.training)
        self.seen.append(x == 0)
        return self.b(x)


def test_each_micro_batch_is_replayed_with_its_own_random_numbers_and_norms() -> None:
    model = Noisy()
    opt = DDPNOpt(model)
    x, y = vectors(8)
    for some in (slice(0, 5), slice(5, 8)):
        (F.cross_entropy(model(x[some]), y[some]) / 2).backward()
    statistics, rng = model.norm.running_mean.clone(), torch.get_rng_state()
    first = list(model.seen)
    opt.step()
    assert len(model.seen) > 4  # probed and replayed
    for k, zeros in enumerate(model.seen[2:]):
        assert torch.equal(zeros, first[k % 2])
    assert torch.equal(model.norm.running_mean, statistics)
    assert torch.equal(torch.get_rng_state(), rng)


def without_bias() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 4, bias=False), nn.Tanh(), nn.Linear(4, 3, bias=False))


@pytest.mark.parametrize("options", [{}, {"lr": 0.5}, {"closed_loop": True}, {"lr": 0.3, "value": "outer"}])
def test_micro_batches_of_different_length_step_as_if_they_had_been_padded(options: dict[str, Any]) -> None:
    """With places at which there are zeros, as in these layers without biases."""
    a, b = twins(without_bias())
    for model, padded in ((a, False), (b, True)):
        opt = DDPNOpt(model, **options)
        for seed in range(4):
            g = torch.Generator().manual_seed(seed)
            for tokens in (2, 3):
                x, y = torch.randn(4, tokens, 5, generator=g), torch.randint(3, (4 * tokens,), generator=g)
                z = model(F.pad(x, (0, 0, 0, 3 - tokens)) if padded else x)[:, :tokens]
                (F.cross_entropy(z.flatten(0, 1), y) / 2).backward()
            opt.step()
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-7, atol=1e-9)


class Tasks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.common, self.heads = nn.Linear(5, 6), nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 2)])

    def forward(self, x: Tensor, task: int) -> Tensor:
        return self.heads[task](torch.tanh(self.common(x)))  # type: ignore[no-any-return]


def of_tasks(model: nn.Module, steps: int) -> float:
    opt, losses = DDPNOpt(model), []
    x, y = vectors(8)
    for _ in range(steps):
        losses.append(0.0)
        for task in range(2):
            loss = F.cross_entropy(model(x, task), y % (3 - task))
            loss.backward()
            losses[-1] += float(loss.detach())
        opt.step()
        opt.zero_grad()
    return losses[-1] / losses[0]


def test_micro_batches_through_different_layers_are_named_and_trained_without_feedback() -> None:
    model = Tasks()
    with pytest.warns(OpenLoopWarning, match=r"common\.weight.*ran different layers.*step\(\) after each"):
        assert of_tasks(model, 30) < 0.9


def test_a_fixed_learning_rate_refuses_micro_batches_through_different_layers() -> None:
    model = Tasks()
    opt = DDPNOpt(model, lr=0.5)
    before = weights(model)
    x, y = vectors(8)
    for task in range(2):
        F.cross_entropy(model(x, task), y % (3 - task)).backward()
    with pytest.raises(ModelError, match="ran different layers"):
        opt.step()
    assert same(model, before)


def test_an_error_in_one_micro_batch_of_the_second_pass_takes_the_step_back() -> None:
    class Moody(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.calls = nn.Linear(5, 4), nn.Linear(4, 3), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            h = torch.tanh(self.a(x))
            if self.calls == 6:  # the second micro-batch of the second pass; the third and fourth call probe the chain
                raise ValueError("enough")
            return self.b(h)

    model = Moody()
    opt = DDPNOpt(model, value="outer", lr=0.5)
    before = weights(model)
    x, y = vectors(8)
    for some in (slice(0, 4), slice(4, 8)):
        F.cross_entropy(model(x[some]), y[some]).backward()
    with pytest.raises(ValueError, match="enough"):
        opt.step()
    assert same(model, before)
    micro_steps(model, opt, vectors, [4, 4], steps=1)
    assert distance(model, before) > 1e-3


def test_what_is_kept_of_a_micro_batch_is_what_its_layers_have_read_and_no_graph() -> None:
    """Activations between the layers are the larger part of a deep network's memory; they are not kept."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, 4), nn.Linear(4, 3)
            self.between: list[weakref.ref[Tensor]] = []

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            wide = torch.tanh(h.repeat(1, 50))
            if torch.is_grad_enabled():
                self.between.append(weakref.ref(wide))
            return self.b(wide[:, :4] * wide[:, 4:8])

    model = Wide()
    opt = DDPNOpt(model, value="outer", lr=0.5)
    for seed in range(3):
        x, y = vectors(4, seed=seed)
        F.cross_entropy(model(x), y).backward()
    kept = [ref() for ref in model.between]
    assert kept == [None] * 3
    opt.step()
