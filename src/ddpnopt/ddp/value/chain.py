"""The common part of the per-sample forms on a chain of layers: V pulled back through the operations between layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from ddpnopt.ddp.segment import Pullback
from ddpnopt.ddp.stage import Stage
from ddpnopt.linear.layer import Parts


class OnChain(ABC):
    """V_x of each sample; the form of its Hessian is up to the subclass."""

    def __init__(self, V_x: Tensor, segments: Sequence[Pullback]) -> None:
        self.V_x = V_x  # (B, n)
        self.segments = list(segments)  # the operations between the layers, first to last; consumed from the end
        self._at_h: tuple[Tensor, Tensor] | None = None

    @abstractmethod
    def _pull(self, segment: Pullback) -> tuple[Tensor, Tensor]:
        """V_h and the Hessian at h, given V at the end of the segment."""

    def _h(self) -> tuple[Tensor, Tensor]:
        """V pulled back through the activation sigma behind the layer, once per stage."""
        if self._at_h is None:
            self._at_h = self._pull(self.segments.pop())
        return self._at_h

    def v_h(self, stage: Stage) -> Tensor:
        return self._h()[0].view_as(stage.p_h[0])

    def gradient(self, stage: Stage) -> Parts:
        return stage.layer.grad(stage.x, self.v_h(stage))

    def prepare(self, stage: Stage) -> None:
        return
