"""A penalty on the weights in the loss takes part in the step, its value and its length."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt import DDPNOpt
from ddpnopt.ddp.penalty import Penalties, Penalty


def _loss(model: nn.Module, x: Tensor, y: Tensor, absolute: float, square: float) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    for p in model.parameters():
        loss = loss + absolute * p.abs().sum() + square * p.square().sum()
    return loss


def _trained(absolute: float, square: float, steps: int = 40, **options: float) -> tuple[nn.Module, list[float]]:
    x = torch.randn(64, 10)
    y = (x @ torch.randn(10, 3)).argmax(1)
    model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 3))
    opt = DDPNOpt(model, **options)  # type: ignore[arg-type]
    losses = []
    for _ in range(steps):
        opt.zero_grad()
        loss = _loss(model, x, y, absolute, square)
        loss.backward()
        opt.step()
        losses.append(float(loss.detach()))
    return model, losses


@pytest.mark.parametrize(("absolute", "square"), [(0.3, 0.0), (0.0, 3.0), (0.3, 3.0)])
def test_a_penalty_that_outweighs_the_loss_is_reduced_to_the_size_of_the_loss(absolute: float, square: float) -> None:
    _, losses = _trained(absolute, square)
    assert losses[0] > 10
    assert losses[-1] < 3  # a network of zeros has 1.1
    assert max(losses) < 1.1 * losses[0]


def test_a_mild_penalty_leaves_the_network_able_to_learn() -> None:
    _, losses = _trained(0.001, 0.0)
    assert losses[-1] < 0.5


def test_weight_decay_of_any_size_never_overshoots() -> None:
    model, losses = _trained(0.0, 0.0, weight_decay=1e4)
    assert losses[-1] == pytest.approx(1.0986, rel=1e-2)
    assert max(float(p.detach().abs().max()) for p in model.parameters()) < 1e-2


def test_the_value_of_a_penalty_follows_from_its_gradient() -> None:
    u = [torch.randn(5, 4), torch.randn(5)]
    gradient = [0.3 * u[0].sign() + 0.2 * u[0], 0.7 * u[1]]
    value = 0.3 * float(u[0].abs().sum()) + 0.1 * float(u[0].square().sum()) + 0.35 * float(u[1].square().sum())
    found = Penalty.with_gradient(gradient, u)
    assert found.exact
    assert found.value(u) == pytest.approx(value, rel=1e-9)
    penalties = Penalties.of([(gradient, u)])
    assert penalties.taken_from(value + 2.0) == pytest.approx(2.0, rel=1e-9)
    other = Penalty.with_gradient([torch.randn(5, 4), torch.randn(5)], u)
    assert not other.exact


def test_a_squared_error_is_separated_from_a_penalty() -> None:
    torch.manual_seed(0)
    x, t = torch.randn(32, 6), torch.randn(32, 4)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    opt = DDPNOpt(model)
    for _ in range(3):
        opt.zero_grad()
        (3 * F.mse_loss(model(x), t) + 0.01 * sum(p.abs().sum() for p in model.parameters())).backward()
        opt.step()
        assert opt.report.loss == "squared_error"


def _costs(x: Tensor, y: Tensor, make: Callable[[], nn.Module], rate: float, decay: float) -> tuple[float, float]:
    """Loss and decay on all batches after a pass through them: of DDPNOpt and of SGD."""
    costs = []
    for automatic in (True, False):
        torch.manual_seed(1)
        model = make()
        sgd = torch.optim.SGD(model.parameters(), rate, momentum=0.9, weight_decay=decay)
        opt = DDPNOpt(model, weight_decay=decay) if automatic else sgd
        for inputs, labels in zip(x, y, strict=True):
            opt.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            opt.step()
        with torch.no_grad():
            loss = float(F.cross_entropy(model(x.flatten(0, 1)), y.flatten()))
            costs.append(loss + sum(0.5 * decay * float(p.square().sum()) for p in model.parameters()))
    return costs[0], costs[1]


@pytest.mark.parametrize("decay", [1e-3, 1e-2])
def test_the_memory_of_a_step_is_without_its_weight_decay(decay: float) -> None:
    """The decay asks for its part anew in each step: remembered, it would act several times."""
    x = torch.randn(100, 32, 10, generator=torch.Generator().manual_seed(0))
    y = x[..., :3].argmax(-1)
    ours, sgd = _costs(
        x,
        y,
        lambda: nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3)),
        0.1,
        decay,
    )
    assert ours < sgd


@pytest.mark.parametrize("decay", [1e-3, 1e-2])
def test_loss_and_weight_decay_come_to_rest_where_those_of_sgd_do(decay: float) -> None:
    """Important directions of a layer have short steps: a decay that is not scaled alike wipes them out in time."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 64, 10, generator=generator) * torch.logspace(-1, 1, 10)
    y = (x / torch.logspace(-1, 1, 10))[..., :3].argmax(-1)
    ours, sgd = _costs(x, y, lambda: nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3)), 0.05, decay)
    assert ours < 1.05 * sgd
