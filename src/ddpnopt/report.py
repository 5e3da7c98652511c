"""Diagnostics of a step."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(eq=False)
class LayerReport:
    """What one layer did in one step."""

    open_loop: float  # norm of eta M^-1 Q_u
    feedback: float  # norm of eta M^-1 Q_ux dx
    update: float  # norm of what was added to the weights


@dataclass
class Report:
    """What the last step did. With `diagnostics=True` everything, otherwise only what costs nothing."""

    step: int = 0
    skipped: int = 0  # steps not taken so far because something was not finite (on_nonfinite="skip")
    loss: str | None = None  # which loss was recognised, "unknown" if none, where the step needs it
    predicted: float | None = None  # change of the batch loss by the quadratic model
    actual: float | None = None  # change of the batch loss on the same batch, by the new outputs
    fraction: float | None = None  # of the loss that the step asked to remove (steps without a learning rate)
    kappa: float | None = None  # curvature along the steps over that of the quadratic model, a running estimate
    # steps so far that were made again: the loss of the same batch would have risen, a layer would have changed too
    # much, or the curvature was tested
    shortened: int = 0
    undone: int = 0  # … and those given up
    planned: int = 0  # steps so far that followed their plan, without a second forward pass
    guarded: float | None = None  # fraction of sample-layers with s > 1
    layers: dict[str, LayerReport] = field(default_factory=dict)
    open_loop: list[str] = field(default_factory=list)  # parameters updated without feedback
