"""The examples of the usual loops train, each in small form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scripts import script

LOOPS: Any = script("examples/loops/loops.py", "loops_examples")
BATCHES = {"scheduler": 120, "swa": 120}  # as the learning rate falls; else 60


@pytest.fixture(scope="module")
def untrained() -> float:
    return LOOPS.accuracy(LOOPS.network())


@pytest.mark.parametrize("name", LOOPS.LOOPS)
def test_the_loop_trains(name: str, untrained: float, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    assert LOOPS.accuracy(LOOPS.LOOPS[name](BATCHES.get(name, 60))) > max(75, untrained + 10)
    if name == "diagnostics":
        assert "step 60: predicted=-" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["closure", "compile", "activation_checkpointing", "resume"])
def test_the_loop_ends_with_the_weights_of_the_plain_one(name: str) -> None:
    ours, plain = LOOPS.LOOPS[name](12), LOOPS.plain(12)
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
