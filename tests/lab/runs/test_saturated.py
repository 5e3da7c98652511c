"""A network that ends in a sigmoid, under a cross-entropy that it cannot bring to zero, saturates: nothing breaks."""

from __future__ import annotations

import math

import pytest
import torch

from ddpnopt import DDPNOpt
from ddpnopt.lab.runs.classification import ClassificationTask
from ddpnopt.lab.runs.training import run_epochs


@pytest.mark.parametrize("seed", [7, 9])
def test_gradients_near_the_smallest_numbers_lead_to_no_weights_that_are_not_finite(seed: int) -> None:
    problem = ClassificationTask("wine", "fcn", epochs=60, batch_size=8).problem(seed)
    opt = DDPNOpt(problem.model)
    record = run_epochs(problem, opt, torch.Generator().manual_seed(seed))
    assert not record.diverged
    assert all(map(math.isfinite, record.losses))
    assert record.final_loss < 0.75  # 0.5514 is the least that a sigmoid allows
