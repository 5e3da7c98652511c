"""Weights that the training loop puts back after each step: clamped, masked or pruned ones.

What is put back was part of the plan, and the rest of it alone may do harm: where only decreases of weights are undone,
because these are at zero, every step increases the outputs. So once weights are found where they were before the last
step, each of them is left out of the plans that would move it in the same direction. That needs the gradients of the
samples by each weight: such layers are treated like parameters that belong to no layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ddpnopt._checks import listed, warn_user
from ddpnopt.errors import TrainingWarning
from ddpnopt.linear.given import BOTH, Given
from ddpnopt.trace.model_layers import ModelLayer

if TYPE_CHECKING:
    from ddpnopt.optimizer import DDPNOpt

FIRST, EVERY = 8, 32  # steps that are watched, and every so many after them
SAMPLE = 256  # weights of a layer that are looked at
LEAST = 0.01  # of them that have to be put back,
TWICE = 2  # … so many times in a row
EXACT = 1e-3  # of the update: by this a weight may differ from what it was before


@dataclass(eq=False)
class Kept:
    """Weights as a step has written them, and by what it has changed them: old minus new."""

    layer: ModelLayer
    p: nn.Parameter
    stride: int
    written: Tensor
    update: Tensor

    def now(self) -> Tensor:
        """What is there."""
        return self.p.detach().flatten()[:: self.stride]


def _put_back(kept: list[Kept]) -> list[tuple[Kept, Tensor, Tensor]]:
    """Which of the weights have been put back since, and which the step had moved; all of a kind in one go."""
    found: list[tuple[Kept, Tensor, Tensor]] = []
    for kind in {(each.written.dtype, each.written.device) for each in kept}:
        some = [each for each in kept if (each.written.dtype, each.written.device) == kind]
        now, written, update = (
            torch.cat(parts) for parts in ([k.now() for k in some], [k.written for k in some], [k.update for k in some])
        )
        rounding, size = torch.finfo(now.dtype).eps * written.abs(), update.abs()
        moved = size > 32 * rounding
        back = moved & ((now - written - update).abs() <= EXACT * size + 4 * rounding)
        sizes = [len(each.written) for each in some]
        found += zip(some, back.split(sizes), moved.split(sizes), strict=True)
    return found


class Held:
    """Finds such weights, and tells the layers in which direction they cannot move."""

    def __init__(self) -> None:
        self.tracked: set[nn.Parameter] = set()  # all of their weights are looked at, after each step
        self._kept: list[Kept] = []
        self._suspected: dict[ModelLayer, int] = {}  # how many times in a row weights were put back

    def keep(self, opt: DDPNOpt) -> None:
        """After a step: what it has written."""
        watched = opt.steps < FIRST or opt.steps % EVERY == 0 or bool(self._suspected)
        if not (watched or self.tracked) or not opt.form.scale_free or opt._group is not None:
            return
        for layer in opt._capture.controls():
            update = opt.state.get(layer.parameters[0], {}).get("update")
            if update is None or len(update) != len(layer.parameters):
                continue
            for p, part in zip(layer.parameters, update, strict=True):
                stride = 1 if p in self.tracked else max(1, p.numel() // SAMPLE)
                if watched or p in self.tracked:
                    some = slice(None, None, stride)
                    kept = Kept(layer, p, stride, p.detach().flatten()[some].clone(), part.flatten()[some])
                    self._kept.append(kept)

    def look(self, opt: DDPNOpt) -> None:
        """Before a step: which weights the loop has put back since the last one."""
        if not self._kept:
            return
        kept, self._kept = self._kept, []
        found = _put_back(kept)
        if all(torch.equal(back, moved) for _, back, moved in found):
            return  # no step since, or all weights of an earlier time have been put back
        self._suspect(opt, [(each.layer, int(back.sum()), int(moved.sum())) for each, back, moved in found])
        for each, back, moved in found:
            if each.p in self.tracked and each.stride == 1:
                _note(opt.state[each.layer.parameters[0]], each, back, moved)

    def _suspect(self, opt: DDPNOpt, found: list[tuple[ModelLayer, int, int]]) -> None:
        """Count how many times in a row weights of a layer were put back."""
        counts: dict[ModelLayer, tuple[int, int]] = {}
        for layer, back, moved in found:
            before = counts.get(layer, (0, 0))
            counts[layer] = before[0] + back, before[1] + moved
        often = {layer for layer, (back, moved) in counts.items() if back > LEAST * moved}
        self._suspected = {layer: self._suspected.get(layer, 0) + 1 for layer in often if not self._tracks(layer)}
        new = [layer for layer, times in self._suspected.items() if times >= TWICE]
        if not new:
            return
        warn_user(
            f"The training loop puts weights of {listed([layer.name for layer in new])} back after each step (clamped, "
            "masked or copied), so that steps are not carried out as they were planned. From now on such weights do "
            "not take part in the directions that are undone, which costs time. A parametrisation "
            "(torch.nn.utils.parametrize, torch.nn.utils.prune) does the same as a part of the model.",
            TrainingWarning,
        )
        for layer in new:
            del self._suspected[layer]
            self.tracked.update(layer.parameters)
        samples = opt.samples // max(1, opt.steps)
        whole = [each for each in new if each.part_of is None and not isinstance(each.layer, Given)]
        opt._capture.loosen(whole, samples)

    def _tracks(self, layer: ModelLayer) -> bool:
        return all(p in self.tracked for p in layer.parameters)


def _note(state: dict[str, Any], each: Kept, back: Tensor, moved: Tensor) -> None:
    """Remember the directions that were undone, and that the last update has not taken place there."""
    update = state.get("update")
    index = next((k for k, p in enumerate(each.layer.parameters) if p is each.p), None)
    if update is not None and index is not None:
        update[index] = update[index].masked_fill(back.view_as(update[index]), 0.0)
        state.pop("combined_update", None)
    if isinstance(each.layer.layer, Given):  # `Stage` leaves them out
        held = state.get("held")
        held = torch.zeros_like(each.written) if held is None else held * ~(moved & ~back)  # it may have moved away
        now = back * each.update.sign()
        state["held"] = torch.where(now * held < 0, BOTH, torch.where(held == 0, now, held))
