"""The hooks of an optimizer on its model, as its options ask for them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ddpnopt.trace.hooks import Capture
from ddpnopt.trace.model_layers import find_layers

if TYPE_CHECKING:
    from ddpnopt.optimizer import DDPNOpt

INPUT_GRADIENTS_FROM = 2**15  # weights: applying a smaller layer again is faster than recording its input gradient


def capture_of(opt: DDPNOpt, exclude: frozenset[str], weight_grads: bool, batch_dim: int | None) -> Capture:
    """Hooks on all layers of the model that have parameters in the optimizer's groups."""
    feedback = opt.feedback
    # norms and embeddings have no Kronecker factors: they need a curvature that treats each parameter alone
    joint = feedback and opt.form.value != "full"
    every_kind = joint and opt.curvature.open_loop is opt.curvature
    layers = find_layers(opt.model, set(opt._parameters), exclude, every_kind=every_kind)
    input_gradients_from: float = INPUT_GRADIENTS_FROM if opt.recompute is None else 0
    if opt.recompute or not feedback:
        input_gradients_from = math.inf
    capture = Capture(
        opt.model, layers, skip_weight_grads=feedback and not weight_grads, input_gradients_from=input_gradients_from,
        reuse=joint, batch_dim=batch_dim,
    )  # fmt: skip
    capture.arrivals.couples = opt.form.scale_free and feedback and not opt.data_parallel
    return capture
