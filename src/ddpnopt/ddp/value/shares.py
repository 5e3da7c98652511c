"""How much of a step each layer makes: the same relative change for all, less where the network is curved along it.

The slope of the loss along a layer's own update is known before the step, from its samples, and after it, from the next
batch. What it has changed by, relative to the decrease that the layer promised, is the layer's *bend* c_t: 0 where the
loss is straight along its update, 1 where the update has gone to the minimum or beyond it. One length for all layers
makes some of them overshoot while others have hardly begun. So their shares are multiplied by

    exp(-GAIN (c_t - c)),       c the mean over the layers

A slope that has become steeper counts as no bend: where a network is about to leave a plateau, layers that still have
next to no gradient would get the largest shares.

Before the step the next batch's slope is that of unseen samples: what other samples of the batch do to each one. A
layer with noisy gradients has little slope before and after, and keeps its share.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ddpnopt.ddp.stage import Stage

GAIN = 2.0  # how strongly the bend of a layer acts on the logarithm of its share
DECAY = 0.9  # of its running mean


def correct(stages: list[Stage], slopes: list[float]) -> None:
    """Take in the slope of this batch's loss along the last update of each layer, and multiply eta of the stages."""
    bends: list[tuple[Stage, float]] = []
    for stage, slope in zip(stages, slopes, strict=True):
        state = stage.state
        promised, unseen = state.pop("promised", (0.0, 0.0))  # of the last step alone
        mean, weight = state.get("bend", (0.0, 0.0))
        if promised > 0 and math.isfinite(slope):
            bend = max(0.0, min(1.0, (slope + unseen) / promised))
            mean, weight = DECAY * mean + (1 - DECAY) * bend, DECAY * weight + 1 - DECAY
            state["bend"] = (mean, weight)
        if weight > 0:
            bends.append((stage, mean / weight))
    if bends:
        middle = sum(bend for _, bend in bends) / len(bends)
        for stage, bend in bends:
            stage.eta *= math.exp(-GAIN * (bend - middle))


def promise(
    stages: list[Stage], sums: Tensor, diagonals: Tensor, w: Tensor, priors: Tensor | None, fraction: float
) -> None:
    """Keep the first-order decrease that each layer's part of a step promises, of all samples and of unseen ones.

    `sums` and `diagonals` are those of the rows of eta K of the stages, `priors` what the prior of each stage does to
    each sample's loss, (T, N) each; w the weights of the samples.
    """
    own = torch.mv(sums, w) if priors is None else torch.addmv(priors.sum(1), sums, w)
    for stage, of_all, of_itself in zip(stages, own.tolist(), torch.mv(diagonals, w).tolist(), strict=True):
        stage.state["promised"] = (fraction * of_all, fraction * max(0.0, of_all - of_itself))
