"""SGD-VGR: SGD with the regulariser of Pascanu et al. (2013) against vanishing gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ddpnopt._checks import require
from ddpnopt.errors import ModelError
from ddpnopt.lab.baselines.base import ChainOptimizer, Pass
from ddpnopt.lab.baselines.chain import require_fully_connected

SMALL = 1e-20  # |delta|^2 below which a term says nothing


def penalty_gradient(W: Tensor, v: Tensor, delta: Tensor) -> Tensor:
    """dOmega/dW (…, O, n) of a layer: `v` is the gradient at its output (…, B, O), `delta` behind its activation."""
    pulled = v @ W  # (…, B, n): W' (sigma' . delta)
    size = delta.square().sum(-1)
    kept = size >= SMALL
    size = torch.where(kept, size, 1.0)
    r = pulled.square().sum(-1) / size
    # d(r - 1)^2/dW = 4 (r - 1) v pulled' / |delta|^2
    w = torch.where(kept, 4 * (r - 1) / size, 0.0) / v.shape[-2]
    return (w[..., None] * v).mT @ pulled


class SGDVGR(ChainOptimizer):
    """SGD on the loss plus `weight` times Omega, which asks each layer to keep the norm of the gradient.

        Omega = sum_t mean_i (r_ti - 1)^2        r_ti = |W_t' (sigma' . delta_{t+1})|^2 / |delta_{t+1}|^2

    with delta_{t+1} the gradient of the batch loss at sample i's output of layer t (behind its activation sigma). As in
    the original, Omega is differentiated through the W_t that stands in r_t alone, delta and sigma' held fixed, and
    terms with |delta|^2 < 1e-20 are left out.

    Args:
        model: a chain of `nn.Linear` layers.
        lr: learning rate.
        weight: of Omega.
        momentum, weight_decay: as in `torch.optim.SGD`.
    """

    def __init__(
        self, model: nn.Module, lr: float, *, weight: float = 2.0, momentum: float = 0.0, weight_decay: float = 0.0
    ) -> None:
        options: dict[str, Any] = {"lr": lr, "weight": weight, "momentum": momentum, "weight_decay": weight_decay}
        for name, value in options.items():
            require(float(value) >= 0, name, value, "zero or positive")
        super().__init__(model, options, skip_weight_grads=False)
        require_fully_connected(self.stages, type(self).__name__)

    def penalty_gradients(self, seen: Pass) -> list[Tensor]:
        """dOmega/dW_t of each layer."""
        gradients = []
        for stage, v, delta in zip(self.stages, seen.grad_h, seen.grad_x[1:], strict=True):
            assert delta is not None
            if v.dim() != 2 or delta.dim() != 2:
                raise ModelError(f"SGDVGR needs states (batch, units), but layer '{stage.unit.name}' has other ones.")
            gradients.append(penalty_gradient(stage.unit.parameters[0].detach(), v, delta))
        return gradients

    def _propose(self, seen: Pass) -> list[list[Tensor]]:
        group = self.param_groups[0]
        lr, weight, momentum, decay = (float(group[name]) for name in ("lr", "weight", "momentum", "weight_decay"))
        new = []
        for stage, penalty in zip(self.stages, self.penalty_gradients(seen), strict=True):
            W = stage.unit.parameters[0]
            u = []
            for p in stage.parameters:
                d = torch.zeros_like(p) if p.grad is None else p.grad.clone()
                d.add_(p, alpha=decay)
                if p is W:
                    d.add_(penalty, alpha=weight)
                if momentum:
                    old = self.state[p].get("momentum_buffer")
                    d = d if old is None else d + momentum * old
                    self.state[p]["momentum_buffer"] = d
                u.append(p - lr * d)
            new.append(u)
        return new
