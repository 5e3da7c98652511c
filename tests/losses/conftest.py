"""Losses on small real data, in float32 as users have it, on one thread."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _fixed_ground() -> None:
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(1)
