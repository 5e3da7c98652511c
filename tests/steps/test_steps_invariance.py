"""What an automatic step does not depend on: scale of the loss, order of the samples, some rescalings."""

from __future__ import annotations

from copy import deepcopy
from random import Random

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from step_runs import Batches, apart, classes, relu_network, targets, trained, weights
from torch import nn

from ddpnopt import DDPNOpt
from ddpnopt.ddp.value import scale_free

seeds = st.integers(0, 10_000)


@settings(max_examples=15)
@given(seeds, st.integers(-6, 5), st.sampled_from([1.0, 1.234, 2.0, 3.17, 7.43]))
def test_cross_entropy_of_any_scale_gives_the_same_weights(seed: int, power: int, digits: float) -> None:
    """A factor within 1e-4 of a round one is taken for it, so those are left out."""
    model, batches, scale = relu_network(seed), classes(seed), digits * 10.0**power
    scaled = trained(model, batches, lambda z, y: scale * F.cross_entropy(z, y))
    assert apart(weights(scaled), weights(trained(model, batches))) < 1e-6


@settings(max_examples=15)
@given(seeds, st.integers(-6, 6), st.sampled_from([(1.0, 1.0), (3.17, 3.17), (3.17, 7.43)]))
def test_a_squared_error_of_any_scale_gives_the_same_weights_with_its_value_handed_over(
    seed: int, power: int, digits: tuple[float, float]
) -> None:
    """Factors with a round first digit are recognised for certain, others are not: like is compared with like."""
    model, batches = relu_network(seed), targets(seed)
    one, other = (
        trained(model, batches, lambda z, y, scale=scale: scale * F.mse_loss(z, y), hand_over=True)
        for scale in (digits[0], digits[1] * 10.0**power)
    )
    assert apart(weights(other), weights(one)) < 1e-6


@settings(max_examples=15)
@given(seeds, st.randoms(use_true_random=False))
@example(3, Random(0))  # a layer that promises nothing
def test_the_order_of_the_samples_does_not_matter(seed: int, random: object) -> None:
    model, batches = relu_network(seed), classes(seed)
    mixed: Batches = []
    for x, y in batches:
        order = list(range(len(x)))
        random.shuffle(order)  # type: ignore[attr-defined]
        mixed.append((x[order], y[order]))
    assert apart(weights(trained(model, mixed)), weights(trained(model, batches))) < 1e-6


@settings(max_examples=15)
@given(seeds)
def test_each_sample_twice_gives_the_first_step_of_half_the_damping(seed: int) -> None:
    """Twice the evidence: the damping, relative to one sample, weighs half as much against both copies."""
    model, batches = relu_network(seed), classes(seed, samples=12)
    twice = [(torch.cat([x, x]), torch.cat([y, y])) for x, y in batches]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scale_free, "DAMPING", 0.5 * scale_free.DAMPING)
        expected = weights(trained(model, batches[:1]))
    assert apart(weights(trained(model, twice[:1])), expected) < 1e-6
    assert weights(trained(model, twice)).isfinite().all()  # later steps are longer: no copy is really left out


def rescaled_inputs(model: nn.Sequential, batches: Batches, c: float) -> tuple[nn.Sequential, Batches]:
    """The same function of inputs that are c times as large."""
    model = deepcopy(model)
    with torch.no_grad():
        model[0].weight.div_(c)
    return model, [(c * x, y) for x, y in batches]


@settings(max_examples=15)
@given(seeds, st.floats(-2, 2))
def test_one_layer_without_bias_does_not_depend_on_the_scale_of_its_inputs(seed: int, power: float) -> None:
    torch.manual_seed(seed)
    model, batches = nn.Sequential(nn.Linear(4, 3, bias=False)), classes(seed)
    other, others = rescaled_inputs(model, batches, 10.0**power)
    new, expected = trained(other, others), trained(model, batches)
    assert apart(new(others[0][0]), expected(batches[0][0])) < 1e-6


def rescaled_layers(model: nn.Sequential, a: float) -> nn.Sequential:
    """The same function: the first layer's output times a, the weights after its ReLU divided by a."""
    model = deepcopy(model)
    with torch.no_grad():
        model[0].weight.mul_(a)
        model[0].bias.mul_(a)
        model[2].weight.div_(a)
    return model


@settings(max_examples=15)
@given(seeds, st.floats(-2, 4))
def test_a_layer_does_not_depend_on_the_scale_of_a_fixed_layer_after_its_relu(seed: int, power: float) -> None:
    """With all biases. The scale of the output gradients cancels exactly, unless the weights are next to zero."""
    batches = classes(seed)
    outputs = []
    for model in (relu_network(seed), rescaled_layers(relu_network(seed), 10.0**power)):
        opt = DDPNOpt(model, params=model[0].parameters())
        for x, y in batches:
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
        outputs.append(model(batches[0][0]))
    assert apart(outputs[1], outputs[0]) < 1e-6


def learnable(seed: int, steps: int = 40) -> Batches:
    return [(x, (x[:, 0] > 0).long()) for x, _ in classes(seed, steps=4, samples=16)] * (steps // 4)


def loss_after(model: nn.Module, batches: Batches) -> float:
    x, y = (torch.cat(parts) for parts in zip(*batches[:4], strict=True))
    return F.cross_entropy(trained(model, batches)(x), y).item()


@pytest.mark.parametrize("c", [0.01, 0.1, 10.0, 100.0])
def test_training_succeeds_at_any_scale_of_the_inputs_and_of_relu_layers(c: float) -> None:
    batches = learnable(0)
    assert loss_after(relu_network(), batches) < 0.2
    assert loss_after(*rescaled_inputs(relu_network(), batches, c)) < 0.35
    assert loss_after(rescaled_layers(relu_network(), c), batches) < 0.35


@pytest.mark.parametrize("factor", [1e-2, 7.0, 100.0])
def test_without_biases_rescaled_inputs_and_relu_layers_give_the_same_network(factor: float) -> None:
    def network() -> nn.Sequential:
        return relu_network(3, bias=(False, False, False))

    batches = classes(3)
    inputs, layers = network(), network()
    with torch.no_grad():
        inputs[0].weight.div_(factor)
        layers[0].weight.mul_(factor)
        layers[2].weight.div_(factor)
    rescaled = [(factor * x, y) for x, y in batches]
    x = batches[0][0]
    expected = trained(network(), batches)(x)
    torch.testing.assert_close(trained(inputs, rescaled)(factor * x), expected, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(trained(layers, batches)(x), expected, rtol=1e-8, atol=1e-8)
