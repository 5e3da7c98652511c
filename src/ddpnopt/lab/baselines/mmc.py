"""The Max-Mahalanobis centre loss (Pang et al. 2019), with which the paper studies vanishing gradients."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ddpnopt._checks import require
from ddpnopt.errors import ModelError, OptionError


def mmc_centres(classes: int, dim: int, scale: float = 10.0) -> Tensor:
    """L = `classes` points (L, dim) of norm `scale`, as far from each other as L points can be: a regular simplex.

    mu_1 = e_1, mu_kj = -(1/(L-1) + <mu_k, mu_j>) / mu_jj for j < k, mu_kk = sqrt(1 - |mu_k|^2), times `scale`; the
    inner products of different centres are -scale^2/(L-1). mu_LL is zero, so that L - 1 dimensions are enough.
    """
    require(isinstance(classes, int) and classes >= 2, "classes", classes, "an integer >= 2")
    require(math.isfinite(scale) and scale > 0, "scale", scale, "positive")
    if dim < classes - 1:
        raise OptionError(
            f"dim={dim} is too small: {classes} centres with equal distances need at least {classes - 1} dimensions."
        )
    mu = torch.zeros(classes, max(dim, classes), dtype=torch.float64)
    for k in range(classes):
        for j in range(k):
            mu[k, j] = -(1 / (classes - 1) + mu[k] @ mu[j]) / mu[j, j]
        if k < classes - 1:  # the last one is zero but for rounding
            mu[k, k] = math.sqrt(1 - float(mu[k] @ mu[k]))
    return (scale * mu[:, :dim]).to(torch.get_default_dtype())


class MMCLoss(nn.Module):
    """Half the squared distance of the outputs to the centre of their class, averaged (or summed) over the batch."""

    centres: Tensor

    def __init__(self, classes: int, dim: int | None = None, scale: float = 10.0, reduction: str = "mean") -> None:
        super().__init__()
        require(reduction in ("mean", "sum"), "reduction", reduction, "'mean' or 'sum'")
        self.reduction = reduction
        self.register_buffer("centres", mmc_centres(classes, classes if dim is None else dim, scale))

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        distances = 0.5 * (z - self._like(z)[y]).square().sum(1)
        return distances.mean() if self.reduction == "mean" else distances.sum()

    def predict(self, z: Tensor) -> Tensor:
        """The class of the nearest centre: (B,)."""
        # all centres have the same norm, so the nearest is the one with the largest inner product
        return (z @ self._like(z).T).argmax(1)

    def _like(self, z: Tensor) -> Tensor:
        if z.dim() != 2 or z.shape[1] != self.centres.shape[1]:
            raise ModelError(
                f"MMCLoss has centres in {self.centres.shape[1]} dimensions, the model gives outputs of shape "
                f"{tuple(z.shape)}: it needs (batch, {self.centres.shape[1]})."
            )
        return self.centres.to(z)


def mmc_terminal(z: Tensor) -> Tensor:
    """The Hessian of each sample's MMC loss, the identity: (B, n, n).

    As `terminal=` of DDPNOpt it serves value="full", which takes the Hessian, and value="batch", which takes a factor.
    """
    B, n = z.shape
    return torch.eye(n, dtype=z.dtype, device=z.device).expand(B, n, n)
