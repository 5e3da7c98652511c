"""The losses of stacked runs: outputs (R, B, C) and classes (R, B) to mean, gradients and Hessians' roots."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ddpnopt.lab.baselines import mmc_centres

Seen = tuple[Tensor, Tensor, Callable[[], Tensor]]
"""The mean loss of each run (R,), each sample's own gradient (R, B, C), and a root of its Hessian (R, B, C, C)."""


def _cross_entropy(z: Tensor, y: Tensor) -> Seen:
    log_p = torch.log_softmax(z, 2)
    losses = -log_p.gather(2, y[:, :, None]).squeeze(2).mean(1)
    s = log_p.exp()
    gradient = s.scatter_add(2, y[:, :, None], s.new_full((), -1.0).expand(*y.shape, 1))

    def root() -> Tensor:
        """diag(q) - q s' with q = sqrt(s), whose square is diag(s) - s s'."""
        q = s.sqrt()
        return torch.diag_embed(q) - q[:, :, :, None] * s[:, :, None, :]

    return losses, gradient, root


def _mmc(z: Tensor, y: Tensor) -> Seen:
    gradient = z - mmc_centres(z.shape[2], z.shape[2]).to(z)[y]
    eye = torch.eye(z.shape[2], dtype=z.dtype, device=z.device)
    return 0.5 * gradient.square().sum(2).mean(1), gradient, lambda: eye.expand(*z.shape, z.shape[2])


LOSSES: dict[str, Callable[[Tensor, Tensor], Seen]] = {"cross_entropy": _cross_entropy, "mmc": _mmc}
