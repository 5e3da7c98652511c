"""Small networks, batches and training runs with automatic steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt import DDPNOpt

Batches = list[tuple[Tensor, Tensor]]
LossFunction = Callable[[Tensor, Tensor], Tensor]
SIZES = ((4, 6), (6, 5), (5, 3))


def relu_network(seed: int = 0, bias: tuple[bool, bool, bool] = (True, True, True)) -> nn.Sequential:
    torch.manual_seed(seed)
    first, second, last = (nn.Linear(n, m, bias=b) for (n, m), b in zip(SIZES, bias, strict=True))
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), last)


def classes(seed: int = 0, steps: int = 5, samples: int = 7) -> Batches:
    g = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(samples, 4, generator=g, dtype=torch.float64), torch.randint(3, (samples,), generator=g))
        for _ in range(steps)
    ]


def targets(seed: int = 0, steps: int = 5, samples: int = 7) -> Batches:
    g = torch.Generator().manual_seed(seed)
    shapes = ((samples, 4), (samples, 3))
    return [tuple(torch.randn(s, generator=g, dtype=torch.float64) for s in shapes) for _ in range(steps)]  # type: ignore[misc]


def trained(
    model: nn.Module, batches: Batches, loss: LossFunction = F.cross_entropy, *, hand_over: bool = False
) -> nn.Module:
    """A copy of the model after one step for each batch."""
    model = deepcopy(model)
    opt = DDPNOpt(model)
    for x, y in batches:
        opt.zero_grad()
        found = loss(model(x), y)
        found.backward()
        opt.step(loss=found if hand_over else None)
    return model


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def apart(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative to the largest number."""
    return ((a - b).abs().max() / b.abs().max()).item()


def losses_of(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], opt: DDPNOpt | None = None) -> list[float]:
    opt = opt or DDPNOpt(model)
    losses = []
    for x, y in batches:
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        losses.append(loss.item())
        assert weights(model).isfinite().all()
    return losses


class Residual(nn.Module):
    """With a norm, so that its layers are not stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inside, self.norm, self.out = (
            nn.Linear(5, 7),
            nn.Linear(7, 7),
            nn.LayerNorm(7),
            nn.Linear(7, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.out(self.norm(h + torch.tanh(self.inside(h))))
