"""Tests of the runner see none of the machine's data folders."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DDPNOPT_DATA", raising=False)
