"""Convolutions that run on inputs of several sizes in one step: pyramids, heads that several feature maps share."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt import DDPNOpt, OpenLoopWarning


class Pyramid(nn.Module):
    """One convolution on an image and on two smaller ones, which may be extended by zeros first."""

    def __init__(self, *, extended: bool = False, stride: int = 1, mode: str = "zeros") -> None:
        super().__init__()
        self.look = nn.Conv2d(2, 4, 3, stride, padding=1, padding_mode=mode)
        self.last = nn.Linear(12, 3)
        self.extended = extended

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for height, width in ((8, 8), (5, 8), (3, 4)):
            some = x[:, :, :height, :width]
            if self.extended:
                stride = self.look.stride[0]
                h = self.look(F.pad(some, (0, 8 - width, 0, 8 - height)))
                h = h[:, :, : -(-height // stride), : -(-width // stride)]
            else:
                h = self.look(some)
            found.append(torch.tanh(h).mean((2, 3)))
        return self.last(torch.cat(found, 1))  # type: ignore[no-any-return]


def trained(model: nn.Module, steps: int = 6) -> list[float]:
    x, y = torch.randn(12, 2, 8, 8), torch.arange(12) % 3
    opt, losses = DDPNOpt(model), []
    for _ in range(steps):
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.usefixtures("double_on_one_thread")
def test_a_convolution_at_several_sizes_steps_as_if_zeros_made_them_one(stride: int) -> None:
    small = Pyramid(stride=stride)
    large = Pyramid(extended=True, stride=stride)
    large.load_state_dict(copy.deepcopy(small.state_dict()))
    with warnings.catch_warnings():
        warnings.simplefilter("error", OpenLoopWarning)
        for model in (small, large):
            torch.manual_seed(1)
            trained(model)
    for p, q in zip(small.parameters(), large.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-7, atol=1e-9)


def test_a_convolution_at_several_sizes_that_zeros_would_change_is_named_and_trains_without_feedback() -> None:
    model = Pyramid(mode="circular")
    before = model.look.weight.detach().clone()
    with pytest.warns(OpenLoopWarning, match=r"look\.weight"):
        losses = trained(model)
    assert losses[-1] < losses[0]
    assert not torch.equal(model.look.weight, before)
