"""Shared by all tests: repeatable random numbers, and the dtype left as it was found."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _repeatable() -> Iterator[None]:
    torch.manual_seed(0)
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)
