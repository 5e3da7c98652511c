"""The interface of the value functions."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ddpnopt.ddp.stage import Policy, Stage
from ddpnopt.linear.layer import Parts
from ddpnopt.linear.metric import Metric


class ValueFunction(Protocol):
    """V at the current stage; `backward` moves it from t+1 to t."""

    def v_h(self, stage: Stage) -> Tensor:
        """V_h of each sample: like h."""

    def gradient(self, stage: Stage) -> Parts:
        """sum_i g_u' V_h over the samples of this process, without the stage cost."""

    def prepare(self, stage: Stage) -> None:
        """This stage is next: start fetching what it needs from other processes."""

    def backward(self, stage: Stage, metric: Metric) -> Policy:
        """Eq. 4 and 5 at one stage: store what the policy needs, then V_x and V_xx of the stage before."""

    @property
    def guarded_fraction(self) -> float:
        """The fraction of sample-layers where s > 1: clipped, or bounded by the guard."""

    def predicted(self) -> float | None:
        """The change of the batch loss by the quadratic model; None where it is the sum over the stages."""
