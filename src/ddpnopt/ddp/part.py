"""Keeping a part of an update: of a planned step, which is linear in its length, that is a shorter one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ddpnopt.ddp.stage import Stage
from ddpnopt.linear.layer import Parts


def keep_part(stage: Stage, update: Parts, share: float) -> None:
    """Keep this share of the update of a stage: all that is known of it shrinks with it, in place."""
    if stage.kept:  # an update far larger than the weights has left nothing of them
        torch._foreach_copy_(stage.weights, stage.u)
    else:
        torch._foreach_add_(stage.weights, update)
    torch._foreach_mul_(update, share)
    torch._foreach_sub_(stage.weights, update)
    if not stage.is_precise:  # what rounding leaves of it
        torch._foreach_copy_(update, torch._foreach_sub(stage.u, stage.weights))
    stage.fraction *= share
    stage.norms = None if stage.norms is None else [share * norm for norm in stage.norms]
    stage.combined = None if stage.combined is None else share * stage.combined
    if "promised" in stage.state:
        of_all, of_unseen = stage.state["promised"]
        stage.state["promised"] = (share * of_all, share * of_unseen)
    if stage.put_back is not None:
        stage.put_back = partial(_put_back_whole, update, share, stage.put_back)


def _put_back_whole(step: Parts, share: float, put_back: Callable[[], None]) -> None:
    """Put back the values of a step that an update has taken the place of, of which a share is left."""
    torch._foreach_mul_(step, 1 / share)
    put_back()
