"""The hooks of an optimizer on its model, as its options and the parameters that are not frozen ask for them."""

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


def renew_capture(opt: DDPNOpt) -> None:
    """Hooks with the layers that are new."""
    before = opt._capture
    before.remove()
    opt._capture = capture_of(opt, *opt._capturing)
    opt._capture.skip_weight_grads, opt._capture.untouched = before.skip_weight_grads, before.untouched


def follow_unfrozen(opt: DDPNOpt) -> None:
    """Train parameters that were frozen when the optimizer was made as soon as they are not: from the next pass on."""
    frozen = [p for p in opt._frozen if not p.requires_grad]
    if len(frozen) == len(opt._frozen):
        return
    opt._frozen = frozen
    first, mine = opt.param_groups[0]["params"], set(opt._parameters)
    new = {p for p in opt.model.parameters() if p.requires_grad and p not in mine}
    if new:  # in the order of the model, as if they had been there from the start
        first[:] = [p for p in opt.model.parameters() if p in new or any(p is each for each in first)]
        renew_capture(opt)
