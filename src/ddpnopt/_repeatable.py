"""Whether the forward pass gives the same numbers when it is run again: a second pass would show nothing else.

Random numbers of torch, `random` and `np.random` are restored; those of a generator that the model has made are not.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import Tensor

from ddpnopt._checks import warn_user
from ddpnopt._value import Passes
from ddpnopt.errors import TrainingWarning
from ddpnopt.trace.hooks import COPIED
from ddpnopt.trace.recording import Recording
from ddpnopt.trace.replay import ALIKE

if TYPE_CHECKING:
    from ddpnopt.optimizer import DDPNOpt

LOOKS = 4  # at most: one for each sequence of layers


def look_at_repetition(opt: DDPNOpt, passes: Passes, recording: Recording) -> None:
    """Run a pass again without any update; from one that differs on, no step has a second pass."""
    if not (opt.form.scale_free and opt.closed_loop and opt._group is None) or len(opt._chains) >= LOOKS:
        return
    if not _is_repeatable(passes, recording):
        opt.closed_loop = False
        warn_user(
            "The forward pass gives other numbers when it is run again with the same inputs, weights and random state: "
            "does it use a random generator of its own? From now on no step has a second forward pass, as with "
            "closed_loop=False.",
            TrainingWarning,
        )


def _is_repeatable(passes: Passes, recording: Recording) -> bool:
    alike = True

    def compare(before: Tensor, now: Tensor) -> None:
        nonlocal alike
        if now.shape == before.shape and now.is_floating_point():  # of several uses the first is shown alone
            apart = float((now - before).norm())
            alike = alike and (not math.isfinite(apart) or apart <= ALIKE * float(before.norm()))

    # micro-batches take turns at the outputs of layers, too, as in a step
    outputs = passes.replay(recording, lambda t, x: compare(recording.layers[t].x, x), lambda _, h: None)
    for before, now in zip((recording.output(k) for k in recording.used_outputs), recording.used(outputs), strict=True):
        if before.numel() <= COPIED:  # larger ones may have been changed in place since
            compare(before, now)
    return alike
