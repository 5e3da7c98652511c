"""What is updated by the base optimizer, without feedback: Q_ux = 0 (Proposition 1)."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from ddpnopt._distributed import Peers
from ddpnopt.curvature.base import Adam, Curvature, Seen
from ddpnopt.ddp.sweep import descend
from ddpnopt.errors import OpenLoopWarning
from ddpnopt.groups import Groups
from ddpnopt.linear.layer import Layer
from ddpnopt.method import Method
from ddpnopt.report import Report
from ddpnopt.trace.hooked_optimizer import HookedOptimizer
from ddpnopt.trace.model_layers import Unit
from ddpnopt.trace.recording import Stage

OPEN_LOOP_LR = 1e-3  # of Adam, for parameters without feedback beside value="batch"
STACK_LEVEL = 7  # from the warning up to the user's step(): two decorators of torch stand in between


class BaseOptimizer(HookedOptimizer):
    """Parameters without a layer, and layers without feedback."""

    curvature: Curvature
    method: Method
    feedback: bool
    report: Report
    _groups: Groups
    _names: dict[nn.Parameter, str]
    _told: set[str]

    def _layer_state(self, parameters: list[nn.Parameter]) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameters[0]]
        if state.setdefault("parts", len(parameters)) != len(parameters):
            state.clear()  # the bias has been frozen or set free: begin anew
            state["parts"] = len(parameters)
        return state

    def _known_layers(self) -> list[Unit]:
        """Layers whose curvature was found in an earlier step, in a step without a look at them."""
        known = []
        for unit in self._capture.units:
            unit.refresh()
            if all(p.grad is not None for p in unit.parameters) and "step" in self._layer_state(unit.parameters):
                known.append(unit)
        return known

    def _tell(self, rest: list[nn.Parameter]) -> None:
        """Say once which parameters get no feedback."""
        self.report.open_loop = [self._names[p] for p in rest]
        untold = [name for name in self.report.open_loop if name not in self._told]
        if untold:
            self._told.update(untold)
            warnings.warn(
                f"Updated by the base optimizer, without feedback: {', '.join(untold)}. Feedback is for nn.Linear and "
                "nn.Conv layers that run once in model(...) and share no weight.",
                OpenLoopWarning,
                stacklevel=STACK_LEVEL,
            )

    def _open_loop(self, rest: list[nn.Parameter]) -> None:
        """Parameters that belong to no captured layer: the base optimizer."""
        # the learning rate of value="batch" is the inverse of a damping and means nothing to another optimizer
        curvature = Adam() if self.feedback and self.method.value == "batch" else self.curvature.open_loop
        for p in rest:
            self._descend(self._names[p], [p], curvature, None, {})

    def _without_feedback(self, captured: Stage, peers: Peers) -> None:
        """Q_ux = 0 (Proposition 1) for a curvature that watches layers: KFAC or EKFAC on `.grad`."""
        own = float(peers.batch(len(captured.x))) if self.method.mean else 1.0
        dtype = captured.unit.parameters[0].dtype  # autocast may have made the rest smaller
        assert captured.p_h is not None
        v_h = captured.p_h.to(dtype)
        watched = {"x": captured.x.to(dtype), "v_h": lambda: v_h, "scale": own, "peers": peers, "solve_only": True}
        self._descend(captured.name, captured.unit.parameters, self.curvature, captured.layer, watched)

    def _descend(
        self,
        name: str,
        parameters: list[nn.Parameter],
        curvature: Curvature,
        layer: Layer | None,
        watched: Any,
    ) -> None:
        group, l_u = self._groups.settings(name, parameters)
        gradient = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        seen = Seen(lambda: gradient, l_u, layer, **watched)
        state = self.state[parameters[0]] if layer is None else self._layer_state(parameters)
        metric = curvature.observe(state, seen)
        weights: list[Tensor] = list(parameters)
        lr, momentum = float(group["lr"]), group["momentum"]
        if layer is None and self.feedback:
            if group["open_loop_lr"] is not None:
                lr = float(group["open_loop_lr"])
            elif self.method.value == "batch":
                lr, momentum = OPEN_LOOP_LR, 0.0
        descend(weights, state, seen.q_u(), lr, momentum, curvature, metric, layer)
