"""How large a layer counts as: a step changes all layers by about the same share of their sizes.

The size of a layer is the root mean square of its weights, and no less than at its start. Some layers start small on
purpose: at zero (adapters, tokens, the end of a residual branch), or all of them in transformers, whose weights are
0.02 at any width. By shares of so small a size it would take them long to get anywhere. So a layer counts as larger
than it is, by no more than the network as a whole is smaller than usual,

    g = (|x| prod_t s_t / u_t)^(1/T)        u_t = 1 / (3 n)^1/2, torch's start of a layer with n inputs per output

with |x| the size of the inputs and s_t those of the T layers that mix features; and only as far as a relative change of
it does no more to the loss than those of the other layers do on average, or than layers do in usual networks. That is
what tells embeddings of 1e-4 before a layer norm, which are as large as any others, from a last layer of 1e-4. A layer
next to zero counts as u_t, within the same limit. A rescaling of the inputs, or of two layers around a ReLU against
each other, changes none of this.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ddpnopt.ddp.covariance import scale
from ddpnopt.ddp.stage import Stage
from ddpnopt.linear.layer import stacked

EFFECT = 0.25  # of a change of a layer by its own size on the samples' residuals, relative to them: as usual
NEAR_ZERO = 1e-3  # of the usual size: below that a layer counts as one at zero


def set_sizes(stages: list[Stage], squares: list[float], residuals: Tensor, norms: list[float] | None = None) -> None:
    """Set the sizes of all stages, last to first.

    `squares` are the mean squares of the gradients of the samples' residuals in each: (2 phi_i)^1/2, (N,); `norms`
    those of the weights, where they are known.
    """
    if norms is None:
        norms = stacked(torch._foreach_norm([stage.u[0] for stage in stages])).tolist()
    sizes = [norm / max(1, stage.u[0].numel()) ** 0.5 for stage, norm in zip(stages, norms, strict=True)]
    if any("least_size" not in stage.state for stage in stages):
        _start(stages, sizes, squares, residuals)
    for stage, size in zip(stages, sizes, strict=True):
        stage.size = max(size, stage.state["least_size"])


def _start(stages: list[Stage], sizes: list[float], squares: list[float], residuals: Tensor) -> None:
    """Note the least sizes of layers that are new."""
    slopes = [(numbers(stage) * max(0.0, square)) ** 0.5 for stage, square in zip(stages, squares, strict=True)]
    effects = [size * slope for size, slope in zip(sizes, slopes, strict=True) if size * slope > 0]
    known = EFFECT * float(residuals.square().mean()) ** 0.5 if len(stages) > 1 else 0.0  # one layer has no rivals
    mean = max(sum(effects) / len(effects), known) if effects else math.inf
    usual = [_usual(stage) for stage in stages]
    larger = 1 / min(1.0, _gain(stages, sizes, usual))
    for stage, size, slope, least in zip(stages, sizes, slopes, usual, strict=True):
        counted = least if size <= NEAR_ZERO * least else larger * size
        alike = mean / slope if slope > 0 else math.inf
        stage.state.setdefault("least_size", max(size, min(counted, alike)))


def _gain(stages: list[Stage], sizes: list[float], usual: list[float]) -> float:
    """g: how large the network starts, relative to the usual."""
    mixing = [
        (stage, math.log(size / least))
        for stage, size, least in zip(stages, sizes, usual, strict=True)
        if stage.layer.mixes_features and size > NEAR_ZERO * least
    ]
    if not mixing:
        return 1.0
    first = scale(mixing[-1][0].state, "input")
    return math.exp((sum(log for _, log in mixing) + math.log(first)) / len(mixing))


def _usual(stage: Stage) -> float:
    weight = stage.u[0]
    inputs = weight.numel() / max(1, weight.shape[stage.layer.weight_dims[1]]) if weight.dim() else 1.0
    return float((3 * max(1.0, inputs)) ** -0.5)


def numbers(stage: Stage) -> int:
    """How many a layer has to learn: its weights and biases."""
    return stage.u[0].numel() + (stage.u[1].numel() if len(stage.u) > 1 else 0)
