"""The formulas of docs/distributed.md, which benchmarks/communication.py computes, count what a step sends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from scripts import script

ROOT = Path(__file__).parents[2]


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A group of one process: it counts its messages as one of many does."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


communication = script("benchmarks/communication.py", "communication")


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("form", communication.FORMS)
def test_collectives_and_bytes_of_a_step_are_those_of_the_model(form: str) -> None:
    found = communication.count(form, 16, 4)
    told = "the table of docs/distributed.md and the model of benchmarks/communication.py are those of another step"
    assert found["collectives"] == found["collectives, model"], told
    assert found["payload"] == found["payload, model"], told
