"""Every kind of convolution and linear layer gets the step of the reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from optimizer_networks import distance, outer_step, twins, weights
from replay_networks import (
    loss_of,
    step,
)
from torch import nn

from ddpnopt import DDPNOpt

pytestmark = pytest.mark.filterwarnings("ignore::ddpnopt.OpenLoopWarning")


CONVOLUTIONS: dict[str, Callable[[], nn.Module]] = {
    "1d": lambda: nn.Conv1d(2, 4, 3),
    "1d stride padding": lambda: nn.Conv1d(2, 4, 3, stride=2, padding=2),
    "1d same": lambda: nn.Conv1d(2, 4, 4, padding="same"),
    "2d": lambda: nn.Conv2d(2, 4, 3),
    "2d stride": lambda: nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=(0, 1)),
    "2d same, even kernel": lambda: nn.Conv2d(2, 4, (2, 4), padding="same"),
    "2d valid": lambda: nn.Conv2d(2, 4, 2, padding="valid"),
    "2d reflect": lambda: nn.Conv2d(2, 4, 3, padding=(1, 2), padding_mode="reflect"),
    "2d circular": lambda: nn.Conv2d(2, 4, 3, padding=(2, 1), padding_mode="circular"),
    "2d replicate, same": lambda: nn.Conv2d(2, 4, (2, 3), padding="same", padding_mode="replicate"),
    "2d dilation": lambda: nn.Conv2d(2, 4, 2, dilation=(2, 3), padding=1),
    "2d groups": lambda: nn.Conv2d(2, 4, 3, groups=2),
    "2d depthwise, no bias": lambda: nn.Conv2d(2, 6, 3, groups=2, bias=False),
    "3d": lambda: nn.Conv3d(2, 2, 2, stride=2, padding=1),
    "3d circular": lambda: nn.Conv3d(2, 2, (1, 2, 3), padding=(0, 1, 1), padding_mode="circular", bias=False),
    "linear on tokens": lambda: nn.Linear(5, 4),
    "linear on tokens, no bias": lambda: nn.Linear(5, 40, bias=False),
    "linear on two dimensions of tokens": lambda: nn.Linear(5, 4),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("first", [True, False], ids=["first layer", "second layer"])
def test_every_kind_of_layer_gets_the_reference_step(name: str, first: bool) -> None:
    layer = CONVOLUTIONS[name]()
    dims = {"1": 1, "2": 2, "3": 3}.get(name[0], 0)
    shape = (2, *[5] * dims) if dims else (2, 3, 5) if "two" in name else (3, 5)
    x, y = torch.randn(3, *shape), torch.tensor([0, 2, 1])
    if first:
        body: list[nn.Module] = [layer]
    elif dims:
        body = [type(layer)(2, 2, 1), nn.Tanh(), layer]  # type: ignore[call-arg]
    else:
        body = [nn.Linear(5, 5), nn.Tanh(), layer]
    out = nn.Sequential(*body)(x)[0].numel()
    model = nn.Sequential(*body, nn.Tanh(), nn.Flatten(), nn.Linear(out, 3))
    a, b = twins(model)
    before = weights(model)
    step(a, DDPNOpt(a, lr=0.7, value="outer"), loss_of(x, y))
    outer_step(b, loss_of(x, y), 0.7, chain=True)
    assert distance(a, b) < 1e-12
    assert distance(a, before) > 1e-4
