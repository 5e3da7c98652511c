"""The variants of benchmarks/ablations.py fit the optimizer that they change."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from scripts import script
from torch import nn

from ddpnopt import DDPNOpt

ablations = script("benchmarks/ablations.py", "ablations")
VARIANTS: list[Callable[[nn.Module], DDPNOpt]] = [
    found
    for _, found in inspect.getmembers(ablations, inspect.isfunction)
    if found.__module__ == ablations.__name__ and list(inspect.signature(found).parameters) == ["model"]
]


def weights_after(steps: int, variant: Callable[[nn.Module], DDPNOpt]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
    x, y = torch.randn(16, 6), torch.randint(3, (16,))
    opt = variant(model)
    for _ in range(steps):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: str(variant.__name__))
def test_each_variant_trains_and_leaves_the_default_as_it_was(variant: Callable[[nn.Module], DDPNOpt]) -> None:
    before = weights_after(20, DDPNOpt)
    changed = weights_after(20, variant)
    assert all(bool(p.isfinite().all()) for p in changed)
    # the form of a cross-entropy is recognised without its value, which then changes nothing
    alike = all(torch.equal(a, b) for a, b in zip(before, changed, strict=True))
    assert alike == (variant.__name__ == "loss_not_seen")
    assert all(torch.equal(a, b) for a, b in zip(before, weights_after(20, DDPNOpt), strict=True))


def test_the_documented_variants_are_those_of_the_file() -> None:
    assert len(VARIANTS) >= 9
    assert all(variant.__name__ in (ablations.__doc__ or "") for variant in VARIANTS)
