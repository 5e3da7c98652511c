"""The matrices of a large batch are visited stage by stage, those of a small one all together: the same steps."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from step_runs import Residual
from torch import Tensor

from ddpnopt import DDPNOpt
from ddpnopt.ddp.value import scale_free


def trained(closed_loop: bool | None) -> tuple[list[Tensor], list[object]]:
    """The weights after six steps, and what each layer has promised in the last one."""
    torch.manual_seed(0)
    model = Residual().double()
    opt = DDPNOpt(model, closed_loop=closed_loop)
    for _ in range(6):
        x, y = torch.randn(16, 5).double(), torch.randint(3, (16,))
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
    promised = [state["promised"] for state in opt.state.values() if "promised" in state]
    return [p.detach() for p in model.parameters()], [*map(torch.tensor, promised)]


@pytest.mark.parametrize("closed_loop", [True, False])
def test_large_batches_make_the_steps_of_small_ones(closed_loop: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    together = trained(closed_loop)
    monkeypatch.setattr(scale_free, "TOGETHER", 0)
    one_by_one = trained(closed_loop)
    assert len(together[1]) == 4
    torch.testing.assert_close(one_by_one, together, rtol=1e-6, atol=1e-9)
