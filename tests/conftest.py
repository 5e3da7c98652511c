"""Shared by all tests: repeatable random numbers, and the dtype left as it was found."""

import os
from collections.abc import Iterator

# Some virtual machines announce AMX and forbid its use: oneDNN would end bfloat16 products in an illegal instruction.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch
from hypothesis import settings

settings.register_profile("patient", deadline=None)  # how long an example takes says more about the machine
settings.load_profile("patient")


@pytest.fixture(autouse=True)
def _repeatable() -> Iterator[None]:
    torch.manual_seed(0)
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)


@pytest.fixture
def double_on_one_thread(_repeatable: None) -> None:
    """The ground of tests that compare numbers of small networks."""
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
