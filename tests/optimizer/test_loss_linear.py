"""A model may return its samples' losses or log-likelihoods themselves: each sample then has its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ddpnopt import DDPNOpt
from ddpnopt.ddp.loss import LinearLoss
from ddpnopt.ddp.recognise import recognise


def found(z: Tensor, weight: float, total: float) -> LinearLoss:
    loss = recognise(z, torch.full_like(z, weight), True, total)
    assert isinstance(loss, LinearLoss)
    return loss


@pytest.mark.parametrize("shape", [(6,), (6, 1)])
@pytest.mark.parametrize("weight", [1 / 6, -1 / 6, -2.5])
def test_outputs_whose_mean_is_the_loss_are_the_losses(shape: tuple[int, ...], weight: float) -> None:
    z = torch.linspace(0.1, 3.0, 6, dtype=torch.float64).reshape(shape) * (1 if weight > 0 else -1)
    loss = found(z, weight, float((weight * z).sum()))
    shares = loss.per_sample(z)
    assert shares.shape == (6,)
    assert (shares >= 0).all()
    torch.testing.assert_close(shares - shares[0], (weight * z).reshape(6) - (weight * z).reshape(6)[0])
    other = z + 0.1
    assert float(loss.per_sample(other).sum()) + loss.minimum() == pytest.approx(float((weight * other).sum()))


def test_outputs_far_from_zero_ask_for_no_more_than_their_spread() -> None:
    z = 4 + torch.linspace(0, 0.1, 8, dtype=torch.float64)
    assert float(found(z, 1 / 8, float(z.mean())).per_sample(z).sum()) < 0.2


@pytest.mark.parametrize("total", [None, 0.7])
def test_equal_gradients_alone_do_not_make_outputs_the_losses(total: float | None) -> None:
    z = torch.linspace(1, 2, 6)  # an absolute error may have them, too
    assert not isinstance(recognise(z, torch.full_like(z, 1 / 6), True, total), LinearLoss)


class Density(nn.Module):
    """The log-density of a Gaussian whose mean and deviation depend on the input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mean, log_deviation = self.net(x).unbind(1)
        return torch.distributions.Normal(mean, log_deviation.exp()).log_prob(y)


@pytest.mark.parametrize(("noise", "steps", "enough"), [(1.0, 150, 1.6), (0.1, 300, -0.5)], ids=["noisy", "accurate"])
def test_a_model_that_returns_log_likelihoods_trains_and_says_so(noise: float, steps: int, enough: float) -> None:
    """The entropy of the noise is 1.42 and -0.88: the second loss goes below zero on the way."""
    model = Density()
    opt = DDPNOpt(model)
    losses = []
    for _ in range(steps):
        x = torch.randn(64, 2)
        y = 3 * torch.sin(x[:, 0]) + noise * torch.randn(64)
        opt.zero_grad()
        loss = -model(x, y).mean()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    assert opt.report.loss == "sum of outputs"
    assert sum(losses[-20:]) / 20 < enough
