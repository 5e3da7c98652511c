"""Models that return distributions of torch: their parameters are the outputs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributions as D
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt import DDPNOpt


class Policy(nn.Module):
    """A body, some numbers for each sample, made into an output by a function, and a value."""

    def __init__(self, make: Callable[[Tensor], Any], outputs: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.make = make
        self.body, self.head, self.value = nn.Linear(6, 16), nn.Linear(16, outputs), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> tuple[Any, Tensor]:
        h = torch.tanh(self.body(x))
        return self.make(self.head(h)), self.value(h)[:, 0]


def normal(z: Tensor) -> tuple[Tensor, Tensor]:
    mean, log_scale = z.chunk(2, 1)
    return mean, log_scale.exp()


def gaussian(mean: Tensor, scale: Tensor, t: Tensor) -> Tensor:
    return 0.5 * ((t - mean) / scale).square() + scale.log()


Loss = Callable[[Any, Tensor, Tensor], Tensor]
PAIRS: dict[str, tuple[int, Callable[[Tensor], Any], Loss, Callable[[Tensor], Any], Loss]] = {
    "Categorical": (
        3,
        lambda z: D.Categorical(logits=z),
        lambda out, y, t: -out.log_prob(y).mean(),
        lambda z: z.log_softmax(-1),
        lambda out, y, t: F.nll_loss(out, y),
    ),
    "Normal": (
        4,
        lambda z: D.Normal(*normal(z)),
        lambda out, y, t: -out.log_prob(t).sum(1).mean(),
        normal,
        lambda out, y, t: gaussian(*out, t).sum(1).mean() + t.shape[1] * 0.5 * torch.log(torch.tensor(2 * torch.pi)),
    ),
    "Independent": (
        4,
        lambda z: D.Independent(D.Normal(*normal(z)), 1),
        lambda out, y, t: -out.log_prob(t).mean(),
        normal,
        lambda out, y, t: gaussian(*out, t).sum(1).mean() + t.shape[1] * 0.5 * torch.log(torch.tensor(2 * torch.pi)),
    ),
}


def train(model: nn.Module, loss: Loss, steps: int = 5) -> DDPNOpt:
    opt = DDPNOpt(model)
    torch.manual_seed(1)
    for _ in range(steps):
        x = torch.randn(20, 6)
        y, t = (x[:, 0] > 0).long() + (x[:, 1] > 0).long(), x[:, :2].square()
        out, value = model(x)
        opt.zero_grad()
        (loss(out, y, t) + 0.5 * F.mse_loss(value, x[:, 2])).backward()
        opt.step()
    return opt


@pytest.mark.parametrize("name", PAIRS)
def test_the_steps_are_those_of_a_model_that_returns_the_numbers(name: str) -> None:
    outputs, make, loss, plain_make, plain_loss = PAIRS[name]
    model, plain = Policy(make, outputs), Policy(plain_make, outputs)
    plain.load_state_dict(copy.deepcopy(model.state_dict()))
    opt = train(model, loss)
    other = train(plain, plain_loss)
    assert opt.report.open_loop == []
    assert opt.report.loss == other.report.loss
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-8)


def test_a_scale_that_all_samples_share_has_feedback() -> None:
    class Gaussian(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.log_scale = nn.Linear(6, 2), nn.Parameter(torch.zeros(2))

        def forward(self, x: Tensor) -> D.Normal:
            return D.Normal(self.mean(x), self.log_scale.exp())

    torch.manual_seed(0)
    model = Gaussian()
    opt = DDPNOpt(model)
    x = torch.randn(64, 6)
    t = x[:, :2] + torch.tensor([0.1, 1.0]) * torch.randn(64, 2)
    for _ in range(60):
        opt.zero_grad()
        (-model(x).log_prob(t).mean()).backward()
        opt.step()
    assert opt.report.open_loop == []
    residual = (t - model.mean(x)).detach().square().mean(0).sqrt()
    torch.testing.assert_close(model.log_scale.detach().exp(), residual, rtol=0.15, atol=0.0)
