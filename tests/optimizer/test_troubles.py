"""What goes wrong in training is said once, with what to do."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ddpnopt import DDPNOpt, TrainingWarning
from ddpnopt._troubles import WINDOW, Troubles
from ddpnopt.report import Report


@pytest.mark.parametrize(("counter", "word"), [("undone", "stands still"), ("shortened", "twice or more")])
def test_many_bad_steps_are_reported_once_with_the_recognised_loss_and_a_way_out(counter: str, word: str) -> None:
    troubles, report = Troubles(), Report(loss="squared_error")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3 * WINDOW):
            setattr(report, counter, getattr(report, counter) + 1)
            troubles.after_step(report)
    (message,) = [str(w.message) for w in caught]
    assert word in message
    assert "squared_error" in message
    assert "step(loss=loss)" in message


def test_a_loss_whose_value_was_seen_is_not_asked_for() -> None:
    troubles, report = Troubles(), Report(loss="unknown")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3 * WINDOW):
            report.shortened += 1
            troubles.after_step(report, seen=True)
    (message,) = [str(w.message) for w in caught]
    assert "step(loss=loss)" not in message
    assert "larger batches" in message


def test_a_few_bad_steps_are_not_worth_a_word() -> None:
    troubles, report = Troubles(), Report()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for k in range(3 * WINDOW):
            report.shortened += k % 4 == 0
            troubles.after_step(report)


def test_layers_behind_dead_units_are_named() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.fill_(-1.0)
    opt = DDPNOpt(model)
    x, y = torch.randn(16, 4), torch.randint(3, (16,))

    def train() -> None:
        for _ in range(30):
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()

    with pytest.warns(TrainingWarning, match="No gradient reaches 0: .*dead"):
        train()
    assert opt.report.loss == "cross_entropy"  # known without diagnostics


def test_a_bias_whose_gradients_cancel_is_not_called_dead() -> None:
    norm = nn.utils.parametrizations.spectral_norm
    model = nn.Sequential(norm(nn.Linear(2, 8)), nn.LeakyReLU(0.2), norm(nn.Linear(8, 1)))
    opt = DDPNOpt(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", TrainingWarning)
        for _ in range(30):  # within the margin of a hinge loss real and false samples pull the last bias equally
            opt.zero_grad()
            (F.relu(1 - model(torch.randn(16, 2))).mean() + F.relu(1 + model(torch.randn(16, 2))).mean()).backward()
            opt.step()
