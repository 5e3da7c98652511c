"""The Max-Mahalanobis centre loss."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from baseline_networks import assert_equal, fcn, vectors

from ddpnopt import DDPNOpt, ModelError, OptionError
from ddpnopt.lab.baselines import MMCLoss, mmc_centres, mmc_terminal


@pytest.mark.parametrize(
    ("classes", "dim"), [(2, 1), (2, 2), (3, 2), (3, 7), (10, 9), (10, 10), (10, 64), (100, 99), (100, 128)]
)
@pytest.mark.parametrize("scale", [1.0, 10.0])
def test_centres_have_equal_norms_and_equal_angles(classes: int, dim: int, scale: float) -> None:
    mu = mmc_centres(classes, dim, scale)
    assert mu.shape == (classes, dim)
    expected = torch.full((classes, classes), -(scale**2) / (classes - 1))
    expected.fill_diagonal_(scale**2)
    torch.testing.assert_close(mu @ mu.T, expected, rtol=1e-9, atol=1e-9 * scale**2)


def test_the_scale_is_ten_unless_said() -> None:
    torch.testing.assert_close(mmc_centres(4, 5).norm(dim=1), torch.full((4,), 10.0))


@pytest.mark.parametrize(("classes", "dim", "scale"), [(10, 8, 10.0), (1, 5, 10.0), (3, 3, 0.0), (3, 3, -1.0)])
def test_centres_that_cannot_be_are_refused(classes: int, dim: int, scale: float) -> None:
    with pytest.raises(OptionError, match=r"dim=8 is too small|classes=1|scale"):
        mmc_centres(classes, dim, scale)


def test_loss_is_half_the_squared_distance_to_the_own_centre() -> None:
    loss, mu = MMCLoss(3), mmc_centres(3, 3)
    z, y = torch.randn(6, 3), torch.tensor([0, 1, 2, 0, 1, 2])
    each = [0.5 * float(((z[i] - mu[y[i]]) ** 2).sum()) for i in range(6)]
    assert float(loss(z, y)) == pytest.approx(sum(each) / 6)
    assert float(MMCLoss(3, reduction="sum")(z, y)) == pytest.approx(sum(each))


def test_prediction_is_the_nearest_centre() -> None:
    loss = MMCLoss(5, 7)
    z = 10 * torch.randn(50, 7)
    assert torch.equal(loss.predict(z), torch.cdist(z, loss.centres).argmin(1))
    assert torch.equal(loss.predict(loss.centres), torch.arange(5))


def test_terminal_is_the_hessian_of_each_samples_loss() -> None:
    loss, z = MMCLoss(3), torch.randn(4, 3)
    for i in range(4):
        H = torch.autograd.functional.hessian(lambda one: loss(one[None], torch.tensor([1])), z[i])
        torch.testing.assert_close(mmc_terminal(z)[i], H)


@pytest.mark.parametrize("value", ["full", "batch"])
def test_ddpnopt_takes_it_as_terminal_curvature(value: str) -> None:
    """2 w I / n of the mean squared error times n/2 is w I: the same step from a rescaled loss."""
    model = fcn()
    other = copy.deepcopy(model)
    loss = MMCLoss(3)
    opt = DDPNOpt(model, 0.01, value=value, terminal=mmc_terminal)
    # 1/2 |z - mu|^2 = (3/2) mse; an n times larger Hessian written out for the other
    reference = DDPNOpt(other, 0.01, value=value, terminal=lambda z: torch.eye(3).repeat(len(z), 1, 1))
    x, y = vectors()
    opt.zero_grad()
    loss(model(x), y).backward()
    opt.step()
    reference.zero_grad()
    (1.5 * F.mse_loss(other(x), loss.centres[y])).backward()
    reference.step()
    assert_equal(model, other)


def test_outputs_of_another_size_are_named() -> None:
    with pytest.raises(ModelError, match=r"centres in 5 dimensions.*\(2, 3\)"):
        MMCLoss(3, 5)(torch.zeros(2, 3), torch.zeros(2, dtype=torch.long))
