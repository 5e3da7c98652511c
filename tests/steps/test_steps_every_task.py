"""No task is lost: inputs and weights of extreme size, batches without information, and numbers that are not finite."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from step_runs import classes, losses_of, relu_network, weights
from torch import Tensor, nn

from ddpnopt import DDPNOpt, NonFiniteError

Batch = tuple[Tensor, Tensor]


def learnable(scale: float = 1.0, steps: int = 40) -> list[Batch]:
    return [(scale * x, (x[:, 0] > 0).long()) for x, _ in classes(steps=4, samples=16)] * (steps // 4)


@pytest.mark.parametrize(("scale", "steps"), [(1.0, 40), (1e4, 120), (1e-2, 80), (1e-4, 120)])
def test_inputs_of_any_scale_are_learned(scale: float, steps: int) -> None:
    losses = losses_of(relu_network(), learnable(scale, steps))
    # inputs of 1e4 start at a loss of 1,000, and one sample on the wrong side of a boundary costs tens of nats
    assert sum(losses[-4:]) / 4 < max(0.35, 0.01 * losses[0])


@pytest.mark.parametrize("layer", [0, 2, 4])
def test_a_layer_that_starts_at_zero_leaves_it_where_it_has_a_gradient(layer: int) -> None:
    model = relu_network()
    with torch.no_grad():
        model[layer].weight.zero_()
    losses = losses_of(model, learnable(steps=120))
    assert float(model[layer].weight.detach().abs().max()) > 0
    assert sum(losses[-4:]) / 4 < 0.35


def test_a_dead_network_learns_the_frequencies_with_the_bias_that_is_left() -> None:
    """All weights and biases zero: only the last bias has a gradient."""
    model = relu_network()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    losses = losses_of(model, learnable(steps=80))
    assert losses[-1] < 0.9 < losses[0]  # towards log 2, from log 3


def test_a_batch_without_loss_changes_nothing_and_does_not_end_the_training() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    opt = DDPNOpt(model)
    x = torch.randn(8, 4)
    for target in (None, torch.randn(8, 3), None, torch.randn(8, 3)):
        before = weights(model)
        opt.zero_grad()
        z = model(x)
        loss = F.mse_loss(z, z.detach() if target is None else target)
        loss.backward()
        opt.step(loss=loss)
        assert torch.equal(weights(model), before) is (target is None)
        assert weights(model).isfinite().all()


@pytest.mark.parametrize("kind", ["a single sample", "identical samples", "one class", "zero inputs"])
def test_batches_with_little_information_are_learned(kind: str) -> None:
    (x, y), *_ = learnable()
    if kind == "a single sample":
        x, y = x[:1], y[:1]
    elif kind == "identical samples":
        x, y = x[:1].expand(8, -1).contiguous(), y[:1].expand(8).contiguous()
    elif kind == "one class":
        y = torch.zeros_like(y)
    else:
        x, y = torch.zeros_like(x), torch.zeros_like(y)
    losses = losses_of(relu_network(), [(x, y)] * 60)
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.parametrize("seed", range(3))
def test_single_samples_in_turn_do_not_diverge(seed: int) -> None:
    """No sample can be left out of such a batch: a bound of its own keeps the length of its steps."""
    batches = [(x[i : i + 1], y[i : i + 1]) for x, y in learnable(steps=4) for i in range(16)] * 6
    losses = losses_of(relu_network(seed), batches)
    assert sum(losses[-64:]) < 4 * sum(losses[:64])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_inputs_that_are_not_finite_are_refused_and_training_goes_on_as_if_they_had_not_been(bad: float) -> None:
    batches = learnable(steps=12)
    expected, model = relu_network(), relu_network()
    losses_of(expected, batches)
    opt = DDPNOpt(model)
    for i, batch in enumerate(batches):
        if i % 3 == 1:
            x = batch[0].clone()
            x[0, 0] = bad
            opt.zero_grad()
            F.cross_entropy(model(x), batch[1]).backward()
            with pytest.raises(NonFiniteError):
                opt.step()
        losses_of(model, [batch], opt)
    assert torch.equal(weights(model), weights(expected))


def test_a_batch_whose_gram_matrix_overflows_is_skipped_and_training_goes_on() -> None:
    batches = learnable(steps=12)
    expected, model = relu_network(), relu_network()
    losses_of(expected, batches)
    opt = DDPNOpt(model, on_nonfinite="skip")
    for i, (x, y) in enumerate(batches):
        if i % 3 == 1:
            losses_of(model, [(-1e200 * x, y)], opt)
        losses_of(model, [(x, y)], opt)
    assert opt.report.skipped == 4
    assert torch.equal(weights(model), weights(expected))
