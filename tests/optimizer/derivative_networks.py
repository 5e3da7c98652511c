"""Networks with derivatives in the loss, and the gradients of their samples."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ddpnopt import DDPNOpt
from ddpnopt.linear.metric import IDENTITY
from ddpnopt.linear.uses import LinearUses
from ddpnopt.trace.derivatives import joint_batch

Losses = Callable[[nn.Module, Tensor], Tensor]


def net(activation: type[nn.Module] = nn.Tanh) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 8), activation(), nn.Linear(8, 1))


def deep() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 7), nn.Tanh(), nn.Linear(7, 6, bias=False), nn.Softplus(), nn.Linear(6, 1))


def slope_of(z: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(z.sum(), x, create_graph=True)[0]


def joint(opt: DDPNOpt) -> tuple[dict[str, Tensor], Tensor]:
    """The gradients of each sample, by the name of the layer, (B, parameters), and the losses."""
    batch = joint_batch(opt._capture.arrivals)
    recording, losses = batch.recording, batch.losses
    found = {}
    for record in recording.layers:
        assert isinstance(record.layer, LinearUses)
        assert record.p_h is not None
        gradients = record.layer.sample_gradients(record.x, record.p_h)
        rows = [
            torch.cat([part.flatten() for part in gradients.combine(row)]) for row in torch.eye(len(losses)).double()
        ]
        found[record.name] = torch.stack(rows)
        torch.testing.assert_close(gradients.gram(IDENTITY), found[record.name] @ found[record.name].T)
    return found, losses


def laplacian(model: nn.Module, x: Tensor) -> Tensor:
    slope = slope_of(model(x), x)
    return slope_of(slope[:, 0], x)[:, 0] + slope_of(slope[:, 1], x)[:, 1] + x.detach().prod(1)


def interior(model: nn.Module, x: Tensor) -> Tensor:
    return laplacian(model, x.clone().requires_grad_())
