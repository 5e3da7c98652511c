"""The ground of the optimizer's own tests: its small networks, float64, one thread."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "optimizer"))


@pytest.fixture(autouse=True)
def _fixed_ground(double_on_one_thread: None) -> None:
    return
