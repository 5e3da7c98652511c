"""The variants of benchmarks/ablations.py fit the optimizer that they change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from scripts import script
from torch import nn

from ddpnopt import DDPNOpt

ablations = script("benchmarks/ablations.py", "ablations")
VARIANTS: list[Callable[[nn.Module], DDPNOpt]] = [*ablations.PARTS, *ablations.CONSTANTS]


def weights_after(steps: int, variant: Callable[[nn.Module], DDPNOpt]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    body = [nn.Conv1d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 12), nn.Tanh()]
    model = nn.Sequential(nn.Unflatten(1, (1, 6)), *body, nn.Linear(12, 3))
    rule = torch.randn(6, 3)
    opt = variant(model)
    for _ in range(steps):
        x = torch.randn(16, 6)
        opt.zero_grad()
        F.cross_entropy(model(x), (x @ rule + torch.randn(16, 3)).argmax(1)).backward()
        opt.step()
    opt.eval()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: str(variant.__name__))
def test_each_variant_trains_and_leaves_the_default_as_it_was(variant: Callable[[nn.Module], DDPNOpt]) -> None:
    before = weights_after(60, DDPNOpt)
    changed = weights_after(60, variant)
    assert all(bool(p.isfinite().all()) for p in changed)
    # the form of a cross-entropy is recognised without its value, which then changes nothing
    alike = all(torch.equal(a, b) for a, b in zip(before, changed, strict=True))
    assert alike == (variant.__name__ == "loss_not_seen")
    assert all(torch.equal(a, b) for a, b in zip(before, weights_after(60, DDPNOpt), strict=True))


def test_every_variant_is_listed() -> None:
    own = [f for f in vars(ablations).values() if getattr(f, "__module__", "") == ablations.__name__]
    public = {f for f in own if callable(f) and "model" in getattr(f, "__annotations__", {}) and f.__name__[0] != "_"}
    assert public == set(VARIANTS)


def test_constants_are_chosen_on_all_families_but_one(tmp_path: Path) -> None:
    rows = [
        "task,family,method,chance,mean",
        *(f"{task},{family},adam,0,100" for task, family in (("a", "one"), ("b", "two"), ("c", "three"))),
        *(f"{task},{family},ddpnopt,0,90" for task, family in (("a", "one"), ("b", "two"), ("c", "three"))),
        "a,one,ablations:half_reach,0,140",
        "b,two,ablations:half_reach,0,80",
        "c,three,ablations:half_reach,0,85",
        "a,one,ablations:no_memory,0,60",
    ]
    (tmp_path / "suite.csv").write_text("\n".join(rows))
    scores = ablations.Scores(tmp_path / "suite.csv")
    left_out = ablations.leave_one_family_out(scores).splitlines()
    assert left_out[2:] == [
        "| one | the default | 0.900 | 0.900 | 0.900 |",
        "| three | `half_reach` | 1.100 | 0.850 | 0.900 |",
        "| two | `half_reach` | 1.125 | 0.800 | 0.900 |",
        "| mean difference | | | -0.050 | |",
    ]
    [_, _, _, part] = ablations.against_the_default(scores, ablations.PARTS).splitlines()
    assert part.startswith("| `no_memory` | Each step starts from zero")
    assert part.endswith("| 0.600 | 0 | 1 | -0.300 |")
