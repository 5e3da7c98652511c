"""Binary cross-entropy, recognised from p = P(target 1) and the gradient with respect to the logits.

For one element q = w (p - t). A target of 0 or 1 follows from the sign of q, and w from q / p or -q / (1 - p).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ddpnopt.ddp.evidence import enough, has_usual_scale, largest, says_something
from ddpnopt.ddp.loss import Loss

Match = tuple[Tensor, Tensor | float, bool]
"""Targets, weights, and whether the match is certain by itself."""


def hard_targets(p: Tensor, not_p: Tensor, q: Tensor, tol: float) -> Match | None:
    """Targets 0 and 1 at any scale: one weight; one per target (pos_weight), also per column; or one per sample."""
    common = of_one_weight(p, not_p, q, tol)
    if common is not None:
        return common
    live, t, d = _signs(p, not_p, q)
    masked = ~live & (d.abs() > tol)
    columns = torch.arange(p.shape[-1], device=p.device).expand(p.shape)
    samples = torch.arange(len(p), device=p.device).view(-1, *[1] * (p.dim() - 1)).expand(p.shape)
    groupings = [t.long(), 2 * columns + t, samples]
    for group in groupings[:1] if p.dim() == 1 else groupings:
        w = _weights(group, d, q, live, tol)
        if w is not None:
            return t.to(p.dtype), torch.where(masked, 0.0, w[group]), True
    return None


def of_one_weight(p: Tensor, not_p: Tensor, q: Tensor, tol: float) -> Match | None:
    """Targets 0 and 1 of one weight, or without any; faster than `_weights`, as it selects no elements."""
    live, t, d = _signs(p, not_p, q)
    size, apart = q.abs(), d.abs()
    distance = torch.where(live, apart, 0.0)
    number, total = int(live.sum()), float(distance.sum(dtype=torch.float64))
    w = float(size.sum(dtype=torch.float64)) / max(total, torch.finfo(q.dtype).tiny)
    if not number or not largest(size - w * distance) <= tol * float(size.amax()) + 0.01 * tol * w:
        return None
    informative = live & ((distance - total / number).abs() > 5 * tol)
    if int(informative.sum()) - 1 < enough(tol):
        return None
    masked = ~live & (apart > tol)
    weight: Tensor | float = torch.where(masked, 0.0, w).to(q.dtype) if bool(masked.any()) else w
    return t.to(p.dtype), weight, True


def _signs(p: Tensor, not_p: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Which elements have a gradient, which have the target 1, and p - t."""
    live = q != 0
    t = torch.where(live, q < 0, p > 0.5)
    return live, t, torch.where(t, -not_p, p)


def on_logits(z: Tensor, q: Tensor, *, of_probabilities: bool) -> tuple[Tensor, Tensor, Tensor]:
    """P(target 1) and P(target 0) at outputs z, and the gradient with respect to the logits."""
    return (z, 1 - z, q * z * (1 - z)) if of_probabilities else (torch.sigmoid(z), torch.sigmoid(-z), q)


def usual_targets(z: Tensor, q: Tensor, weight: float, near: float) -> Tensor | None:
    """Targets 0 and 1 at logits z, all of one weight that is known; None where the gradient is another."""
    first = (0,) * z.dim()  # most gradients of other losses are told there
    t_first = 0.5 + 0.5 * math.tanh(0.5 * float(z[first])) - float(q[first]) / weight
    if not min(abs(t_first), abs(t_first - 1)) < 2 * near:  # more than for all, for what rounding does
        return None
    t = torch.sub(torch.sigmoid(z), q, alpha=1 / weight)
    hard = t.clamp(0, 1).round_()
    return hard if largest(t.sub_(hard)) < near else None


def _weights(group: Tensor, d: Tensor, q: Tensor, live: Tensor, tol: float) -> Tensor | None:
    """One weight per group such that q = w d, if the gradient says so."""
    count = int(group.max()) + 1
    index, size, distance = group[live], q[live].abs(), d[live].abs()

    def sums(x: Tensor) -> Tensor:
        return x.new_zeros(count).index_add_(0, index, x)

    number, total = sums(torch.ones_like(size)), sums(distance)
    w = sums(size) / total.clamp_min(torch.finfo(q.dtype).tiny)
    # p - t is rounded in units of 1: besides the gradients' own error, 0.01 of the tolerance at the group's weight
    slack = tol * size.amax() + 0.01 * tol * w[index] if len(size) else tol
    if not bool(((size - w[index] * distance).abs() <= slack).all()):
        return None
    # where all p are equal any weight fits: only those that differ from the others of their group say something
    informative = (distance - (total / number.clamp_min(1))[index]).abs() > 5 * tol
    return w if int(informative.sum()) - int((number > 0).sum()) >= enough(tol) else None


def two_targets(p: Tensor, q: Tensor, tol: float) -> Match | None:
    """Smoothed labels at any scale: q = w p - w t has the slope w in both groups, which the sign of q separates."""
    upper = q < 0
    for _ in range(4):
        centred_p, centred_q = p.double().clone(), q.double().clone()
        for group in (upper, ~upper):
            if not bool(group.any()):
                return None
            centred_p[group] -= p[group].double().mean()
            centred_q[group] -= q[group].double().mean()
        w = float((centred_p * centred_q).sum() / centred_p.square().sum().clamp_min(1e-300))
        if w <= 0:
            return None
        t = p - q / w
        upper = t > 0.5
    informative = int((centred_p.abs() > 5 * tol).sum()) - 3
    fits = bool(((centred_q - w * centred_p).abs() <= tol * w).all()) and bool(((t > -tol) & (t < 1 + tol)).all())
    return (t.clamp(0, 1), w, True) if fits and informative >= enough(tol) else None


def zeros_and_ones(p: Tensor, not_p: Tensor, q: Tensor, tol: float) -> Match | None:
    """Targets between 0 and 1 at any scale, many of them 0 or 1: q / p and -q / (1 - p) are at most w, and w there."""
    ratios = torch.cat([(q / p)[p > 0.05], (-q / not_p)[not_p > 0.05]])
    w = float(ratios.amax()) if len(ratios) else 0.0
    if w <= 0:
        return None
    t = p - q / w
    if not _are_targets(t, tol):
        return None
    at_end = (torch.minimum(t.abs(), (t - 1).abs()) < tol) & ((t - p).abs() > 5 * tol)
    informative = int((at_end & ((p - p.mean()).abs() > 5 * tol)).sum())
    return (t.clamp(0, 1), w, True) if informative >= max(enough(tol) + 2, 0.2 * p.numel()) else None


def any_targets(total: float, z: Tensor, p: Tensor, q: Tensor, tol: float) -> Match | None:
    """Any targets, if the loss is known: it is linear in w, sum(w H(p) + q z) with H(p) the entropy."""
    entropy = -(torch.xlogy(p, p) + torch.xlogy(1 - p, 1 - p)).double().sum()
    w = float((total - (q.double() * z.double()).sum()) / entropy.clamp_min(1e-300))
    if w > 0 and has_usual_scale(w, q, tol) and says_something(q, w, tol):  # else all targets are the outputs
        t = p - q / w
        if _are_targets(t, tol):
            return t.clamp(0, 1), w, False
    return None


def with_scale(z: Tensor, q: Tensor, w: float, tol: float, *, of_probabilities: bool) -> Loss | None:
    """Any targets, if the scale is known."""
    p, grad = (z, q * z * (1 - z)) if of_probabilities else (torch.sigmoid(z), q)
    t = torch.sub(p, grad, alpha=1 / w)
    if not _are_targets(t, tol):
        return None
    hard = t.round()
    soft = not largest(t - hard) < max(tol, 1e-3)
    t = t.clamp_(0, 1) if soft else hard
    return Loss("binary_cross_entropy", t, w, of_probabilities=of_probabilities, soft=soft)


def _are_targets(t: Tensor, tol: float) -> bool:
    least, most = t.aminmax()
    return float(least) > -tol and float(most) < 1 + tol
