"""Small tensors on one thread, float64 unless a test says otherwise."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _fixed_ground(double_on_one_thread: None) -> None:
    return
