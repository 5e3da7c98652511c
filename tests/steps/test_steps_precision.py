"""Where a loss is not known more exactly than a step changes it, the step is not judged by it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt import DDPNOpt
from ddpnopt._losses import Losses, rounding
from ddpnopt._step import Step


class WithLoss(nn.Module):
    """A model that returns its loss, a mean squared error beside a constant."""

    def __init__(self, constant: float) -> None:
        super().__init__()
        self.net, self.constant = network(), constant

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.net(x), y) + self.constant


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 3))


def train(model: nn.Module, loss: Callable[[], Tensor], steps: int) -> DDPNOpt:
    opt = DDPNOpt(model)
    for _ in range(steps):
        opt.zero_grad()
        loss().backward()
        opt.step()
    return opt


@pytest.fixture(autouse=True)
def _single_precision() -> None:
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)


def test_a_converged_squared_error_is_not_shortened_by_its_rounding() -> None:
    model = nn.Linear(8, 3)
    x, w = torch.randn(32, 8), torch.randn(8, 3)
    opt = train(model, lambda: F.mse_loss(model(x), x @ w), 300)
    assert F.mse_loss(model(x), x @ w).item() < 1e-12
    assert opt.report.shortened <= 1  # 3 if judged
    assert opt.report.undone == 0


def test_separated_classes_are_not_undone_by_the_rounding_of_their_loss() -> None:
    model = network()
    x, labels = torch.randn(32, 8), torch.randint(3, (32,))
    x[:, 0] += 4 * (labels - 1.0)
    y = F.one_hot(labels, 3).float()
    opt = train(model, lambda: F.binary_cross_entropy_with_logits(model(x), y), 600)
    assert opt.report.undone == 0  # 20 if judged


def test_a_loss_beside_a_large_constant_is_not_undone_by_its_rounding() -> None:
    model = WithLoss(1e4)
    x, y = torch.randn(32, 8), torch.randn(32, 3)
    opt = train(model, lambda: model(x, y), 300)
    assert opt.report.shortened < 10  # 25 if judged
    assert F.mse_loss(model.net(x), y).item() < 0.01


def test_a_step_far_above_the_rounding_of_the_loss_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    finish = Step.finish

    def note(self: Step) -> None:
        if not self.planned:
            assert not self.unjudged
            assert self.recording is not None
            assert self.loss_before is not None
            seen.append(rounding(self.recording, self.losses, self.loss_before) / self.loss_before)
        finish(self)

    monkeypatch.setattr(Step, "finish", note)
    model = network()
    x, labels = torch.randn(32, 8), torch.randint(3, (32,))
    train(model, lambda: F.cross_entropy(model(x), labels), 20)
    assert seen
    assert max(seen) < 1e-6


@pytest.mark.parametrize("kind", ["squared_error", "cross_entropy", "binary_cross_entropy"])
def test_the_rounding_of_a_loss_bounds_its_distance_from_double_precision(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, labels = torch.randn(64, 8), torch.randint(3, (64,))
    hot = F.one_hot(labels, 3).float()
    found: list[tuple[Losses, float, float]] = []
    finish = Step.finish

    def note(self: Step) -> None:
        assert self.recording is not None
        assert self.losses is not None
        found.append((self.losses, self.own_loss, rounding(self.recording, self.losses, self.own_loss)))
        finish(self)

    monkeypatch.setattr(Step, "finish", note)
    model = nn.Linear(8, 3)
    with torch.no_grad():
        model.weight.mul_(30)
    losses: dict[str, Callable[[Tensor], Tensor]] = {
        "squared_error": lambda z: F.mse_loss(z, hot),
        "cross_entropy": lambda z: F.cross_entropy(z, labels),
        "binary_cross_entropy": lambda z: F.binary_cross_entropy_with_logits(z, hot),
    }
    train(model, lambda: losses[kind](model(x)), 1)
    ((z, loss),), own, limit = found[0]
    assert loss.kind == kind
    hot = hot.double()
    assert abs(own - losses[kind](z.double()).item()) <= limit < 1e-5 * own


def test_batches_without_loss_are_no_reason_to_roll_out() -> None:
    torch.manual_seed(0)
    model, x = network(), torch.randn(32, 8)
    with torch.no_grad():
        model[-1].bias.fill_(50.0)  # beyond all margins
    opt = train(model, lambda: F.relu(1 - model(x)).mean(), 100)
    assert opt.report.planned > 80


def test_a_large_constant_is_not_taken_for_the_entropy_of_soft_targets() -> None:
    torch.manual_seed(24)  # where its size is round in that sense, by chance
    model = WithLoss(1e4)
    x, y = torch.randn(32, 8), torch.randn(32, 3)
    train(model, lambda: model(x, y), 300)
    assert F.mse_loss(model.net(x), y).item() < 0.01  # 0.92 if it is
