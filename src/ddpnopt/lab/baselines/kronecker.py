"""KFAC and EKFAC as optimizers of their own: DDPNOpt with Q_ux = 0 (Proposition 1) and that curvature."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from ddpnopt.curvature import kronecker as curvatures
from ddpnopt.curvature.base import Curvature
from ddpnopt.optimizer import DDPNOpt


class _WithoutFeedback(DDPNOpt):
    """Without feedback nothing depends on the form of the value function: the cheapest one."""

    def __init__(self, model: nn.Module, lr: float, curvature: Curvature, options: dict[str, Any]) -> None:
        super().__init__(model, lr, value="outer", curvature=curvature, feedback=False, **options)


class KFACOptimizer(_WithoutFeedback):
    """KFAC (Martens and Grosse 2015; KFC for convolutions), row three of Table 2: u <- u - lr (A (x) G)^-1 J_u.

    Args:
        model: any `nn.Module`; parameters outside `nn.Linear` and `nn.Conv` layers are updated by SGD.
        lr: learning rate.
        damping, refresh, decay: see `ddpnopt.KFAC`, the same code as a curvature of DDPNOpt.
        momentum, weight_decay, reduction, params, exclude, on_nonfinite: as for `DDPNOpt`.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        *,
        damping: float = 1e-2,
        refresh: int = 10,
        decay: float = 0.95,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        reduction: str = "mean",
        params: Iterable[Any] | None = None,
        exclude: Iterable[str] = (),
        on_nonfinite: str = "raise",
    ) -> None:
        options = {
            "momentum": momentum, "weight_decay": weight_decay, "reduction": reduction, "params": params,
            "exclude": exclude, "on_nonfinite": on_nonfinite,
        }  # fmt: skip
        super().__init__(model, lr, curvatures.KFAC(damping, refresh, decay), options)


class EKFACOptimizer(_WithoutFeedback):
    """EKFAC (George et al. 2018): KFAC's eigenbasis with its own second moments; arguments as for `KFACOptimizer`."""

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        *,
        damping: float = 0.03,
        refresh: int = 10,
        decay: float = 0.75,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        reduction: str = "mean",
        params: Iterable[Any] | None = None,
        exclude: Iterable[str] = (),
        on_nonfinite: str = "raise",
    ) -> None:
        options = {
            "momentum": momentum, "weight_decay": weight_decay, "reduction": reduction, "params": params,
            "exclude": exclude, "on_nonfinite": on_nonfinite,
        }  # fmt: skip
        super().__init__(model, lr, curvatures.EKFAC(damping, refresh, decay), options)
