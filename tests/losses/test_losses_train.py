"""Each loss, also times 0.01 and 100, trains about as well as with AdamW: no NaN, and at most one warning."""

from __future__ import annotations

import math

import pytest
from loss_runs import FACTORS, adamw, ddpnopt
from loss_tasks import TASKS

STEPS = 60
WITHIN = 0.9  # of AdamW's decrease of the training loss
BEHIND = {"Dice": 0.7}  # its minimum is far above zero, and the loss after a step is not known


@pytest.mark.parametrize("name", TASKS)
def test_it_trains_about_as_well_as_adamw_at_any_scale(name: str) -> None:
    theirs = adamw(TASKS[name], STEPS)
    for factor in FACTORS:
        ours = ddpnopt(TASKS[name], STEPS, factor)
        assert math.isfinite(ours.after)
        assert len(ours.messages) <= 1, ours.messages
        assert ours.decrease >= BEHIND.get(name, WITHIN) * theirs.decrease, (
            f"x {factor}: {ours.after:.4g}, AdamW {theirs.after:.4g}"
        )


def test_there_are_thirty_losses() -> None:
    assert len(TASKS) >= 30
