"""What a curvature knows: Q_uu ~ M / eta of Table 2, its running state and its inverse.

A curvature holds settings only. Its state lives in a dict for each layer whose entries are *replaced, never changed in
place*, so that a failed step can be undone by restoring the old entries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from ddpnopt._distributed import ALONE, Peers
from ddpnopt.linear.layer import Layer, Parts
from ddpnopt.linear.metric import Metric

State = dict[str, Any]


@dataclass(frozen=True)
class Seen:
    """What one layer shows to its curvature in one step."""

    gradient: Callable[[], Parts]  # sum_i g_u' V_h, called only if needed
    l_u: Parts | None = None  # gradient of the stage cost
    layer: Layer | None = None  # None for parameters that belong to no supported layer
    x: Tensor | None = None  # inputs of the layer
    v_h: Callable[[], Tensor] | None = None  # V_h of each sample, as part of the gradient of the batch loss
    scale: float = 1.0  # times v_h gives the sample's own gradient: B for a mean loss, 1 for a sum
    peers: Peers = ALONE  # the processes with the rest of the batch; `gradient` already covers all of it
    solve_only: bool = False  # without feedback only M^-1 times the gradient is needed

    def q_u(self) -> Parts:
        """Q_u = l_u + sum_i g_u' V_h."""
        gradient = self.gradient()
        return gradient if self.l_u is None else [g + l for g, l in zip(gradient, self.l_u, strict=True)]


@runtime_checkable
class Curvature(Protocol):
    """The interface of a curvature."""

    def observe(self, state: State, seen: Seen) -> Metric:
        """Update M, once per step, and return its inverse."""

    def direction(self, state: State, d: Parts) -> Parts:
        """What is multiplied by M^-1, given d = Q_u + Q_ux dx: d itself, or its running average."""

    def watches(self, state: State) -> bool:
        """Whether the next `observe` needs the layer's inputs and output gradients."""

    @property
    def open_loop(self) -> Curvature:
        """What updates the parameters that belong to no supported layer."""
