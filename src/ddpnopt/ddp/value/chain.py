"""What the per-sample forms on a chain of layers share: V pulled back through what stands between two layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from ddpnopt.ddp.segment import Pullback
from ddpnopt.ddp.value.base import Problem
from ddpnopt.linear.layer import Parts


class OnChain(ABC):
    """V_x of each sample; how its Hessian is kept is the subclass's own."""

    def __init__(self, V_x: Tensor, segments: Sequence[Pullback]) -> None:
        self.V_x = V_x  # (B, n)
        self.segments = list(segments)  # what stands between the layers, first to last; used up from the end
        self._at_h: tuple[Tensor, Tensor] | None = None

    @abstractmethod
    def _pull(self, segment: Pullback) -> tuple[Tensor, Tensor]:
        """V_h and the Hessian at h, given V behind the segment."""

    def _h(self) -> tuple[Tensor, Tensor]:
        """V pulled back through the activation sigma behind the layer, once a stage."""
        if self._at_h is None:
            self._at_h = self._pull(self.segments.pop())
        return self._at_h

    def v_h(self, stage: Problem) -> Tensor:
        return self._h()[0].view_as(stage.p_h[0])

    def gradient(self, stage: Problem) -> Parts:
        return stage.layer.grad(stage.x, self.v_h(stage))

    def prepare(self, stage: Problem) -> None:
        return
