"""The ground of the tests of automatic steps: float64, one thread."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _fixed_ground(double_on_one_thread: None) -> None:
    return
