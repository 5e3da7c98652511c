"""Cross-entropy over classes, recognised from the outputs and their gradient.

At one place (a sample, token or pixel) q = w (s - t) with s the softmax and t the target. Once the weight w is known,
so is the target: t = s - q / w. The forms of cross-entropy differ in how w is found.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ddpnopt.ddp.evidence import enough, largest, says_something
from ddpnopt.ddp.loss import Loss
from ddpnopt.ddp.recognise_binary import hard_targets, two_targets

MOST_CLASSES = 64  # for class weights together with label smoothing, which solve for two numbers per class
MOST_PLACES = 4096  # that such a solution is computed from
SOME = 2**10  # numbers from which on one place is looked at first
MANY = 2**14  # numbers from which on the largest of a row takes longer to find than several sums
FIRST = 8  # classes that are looked at there


def cross_entropy(
    z: Tensor, q: Tensor, dim: int, mean: bool, tol: float, total: float | None, *, rare: bool = True
) -> Iterator[Loss]:
    """Cross-entropies with this gradient, the most likely one first, or that alone; `total` is the loss, if known."""
    n = z.shape[dim]
    if n < 2:
        return
    uniform = n / z.numel() if mean else 1.0
    hard = hard_labels(z, q, dim, uniform, tol)
    if hard is not None:  # the common case first
        yield hard
        return
    if not rare:
        return
    s = torch.softmax(z, dim)
    t = torch.sub(s, q, alpha=1 / uniform)
    size = q.abs().amax()
    row = torch.maximum(q.abs().sum(dim), size)
    if not bool((q.sum(dim).abs() <= tol * max(1.0, n / 256) * row).all()):
        yield from _of_log_probabilities(z, q, dim, tol)
        return
    soft = Loss("cross_entropy", _sharpen(t, dim), uniform, dim, certain=False)
    possible = bool((t > -tol).all())
    if n == 2:
        yield from _two_classes(s, q, dim, tol)
    else:
        if possible and bool((t.amax(dim) > 0.999).all()):
            yield Loss("cross_entropy", soft.target, uniform, dim)
        weighted = _weighted(s, q, dim, tol)
        if weighted is not None:
            yield weighted
        yield from _smoothed(s, q, dim, uniform, tol)
        yield from _with_temperature(z, q, dim, tol)
    if total is not None:  # it is linear in a common weight w: sum(w H(s) + <q, log s>) with H(s) the entropy
        log_s = torch.log_softmax(z, dim).double()
        entropy = -(s.double() * log_s).sum()
        w = float((total - (q.double() * log_s).sum()) / entropy.clamp_min(1e-300))
        if w > 0 and bool((s - q / w > -tol).all()):
            yield Loss("cross_entropy", _sharpen(s - q / w, dim), w, dim, certain=False)
    if possible:
        yield soft


def hard_labels(z: Tensor, q: Tensor, dim: int, w: float, tol: float) -> Loss | None:
    """One class at each place, all places of weight w."""
    if z.numel() >= SOME and not _may_be_hard(z, q, dim, w, tol):
        return None
    log_s = torch.log_softmax(z, dim)
    label = _labels(log_s.exp().sub_(q, alpha=1 / w), dim, tol)
    if label is None:
        return None
    found = Loss("cross_entropy", partial(_one_hot, label, z, dim), w, dim, label.squeeze(dim))
    found = found.knowing(z, log_s.gather(dim, label).mul_(-w).flatten(1).sum(1))
    # at one place at least the probability of the label is no more than exp(-mean loss), which mostly says enough
    certain = -math.expm1(-found.total(z) / (w * label.numel())) > 7 * tol or says_something(q, w, tol)
    return found if certain else replace(found, certain=False)


def _may_be_hard(z: Tensor, q: Tensor, dim: int, w: float, tol: float) -> bool:
    """Whether the first place has hard targets: most gradients of other losses are told there."""
    first = [0] * z.dim()
    place: tuple[int | slice, ...] = (*first[:dim], slice(None), *first[dim + 1 :])
    t = torch.softmax(z[place], 0).sub_(q[place], alpha=1 / w)
    near = 2 * tol  # more than in all places, for what rounding does
    return all(-near <= a <= near or -near <= a - 1 <= near for a in t[:FIRST].tolist())


def _labels(t: Tensor, dim: int, tol: float) -> Tensor | None:
    """The classes of one-hot targets t, which this overwrites; None where they are not one-hot."""
    if t.numel() < MANY or t.device.type != "cpu":
        label = t.argmax(dim, keepdim=True)
        return label if largest(t.scatter_(dim, label, -1.0, reduce="add")) <= tol else None
    hard = t.round()
    if not largest(t.sub_(hard)) <= tol or float(hard.amin()) < 0 or not bool((hard.sum(dim) == 1).all()):
        return None
    # much faster than argmax; in double precision, where products of integers are exact in any mode
    classes = torch.arange(t.shape[dim], dtype=torch.float64)
    return (hard.movedim(dim, -1).double() @ classes).long().unsqueeze(dim)


def with_scale(z: Tensor, q: Tensor, dim: int, w: float, temperature: float, tol: float) -> Loss | None:
    """Any targets, if one weight for all places and the temperature are known."""
    t = torch.softmax(z / temperature if temperature != 1.0 else z, dim).sub_(q, alpha=temperature / w)
    return Loss("cross_entropy", _sharpen(t, dim), w, dim, temperature=temperature) if float(t.min()) > -tol else None


def _of_log_probabilities(z: Tensor, q: Tensor, dim: int, tol: float) -> Iterator[Loss]:
    """The model ends in log_softmax or softmax, and the loss is -w sum t z or -w sum t log z."""
    if bool((q > 0).any()):
        return
    near = max(tol, 1e-3)
    if bool((torch.logsumexp(z, dim).abs() < near).all()):
        weighted, of_probabilities = -q, False
    elif bool(((z >= 0) & (z <= 1)).all()) and bool(((z.sum(dim) - 1).abs() < near).all()):
        weighted, of_probabilities = -q * z, True
    else:
        return
    w = weighted.sum(dim)
    t = weighted / w.unsqueeze(dim).clamp_min(torch.finfo(q.dtype).tiny)
    yield Loss("cross_entropy", _sharpen(t, dim), w, dim, of_probabilities=of_probabilities)


def _two_classes(s: Tensor, q: Tensor, dim: int, tol: float) -> Iterator[Loss]:
    """A weight per place would fit anything here, so it must be that of the label, or of the sample."""
    p, not_p, grad = s.select(dim, 1), s.select(dim, 0), q.select(dim, 1)
    match = hard_targets(p, not_p, grad, tol)
    if match is not None:
        t, weight, certain = match
        yield Loss("cross_entropy", torch.stack([1 - t, t], dim), weight, dim, certain=certain)
        return
    smoothed = two_targets(p, grad, tol)
    if smoothed is not None:
        t, weight, certain = smoothed
        yield Loss("cross_entropy", torch.stack([1 - t, t], dim), weight, dim, certain=certain)


def _weighted(s: Tensor, q: Tensor, dim: int, tol: float, temperature: float = 1.0) -> Loss | None:
    """Hard targets, places of different weight (class weights, ignored labels, a scaled loss)."""
    label = q.argmin(dim, keepdim=True)
    apart = 1 - s.gather(dim, label)
    w = -q.gather(dim, label) / apart.clamp_min(torch.finfo(s.dtype).eps)
    hard = _one_hot(label, s, dim)
    if not bool(((q - w * (s - hard)).abs() <= tol * q.abs().amax()).all()):
        return None
    live = (w > 0) & (apart > 0.01)  # others are ignored, or fitted so well that their weight is all rounding
    weights, labels = w[live], label[live]
    rel = 10 * tol
    same = len(weights) > 0 and bool(((weights - weights.mean()).abs() <= rel * weights.mean()).all())
    if same:
        fitted = s.amax(dim, keepdim=True) > 1 - tol
        common = -q.gather(dim, label)[live].double().sum() / apart[live].double().sum()
        hard = torch.where(fitted & (w <= 0), _one_hot(s.argmax(dim, keepdim=True), s, dim), hard)
        w = torch.where((w > 0) | fitted, common.to(w.dtype), 0.0)
    certain = same or _by_label(weights, labels, s.shape[dim], rel, tol) or _by_sample(w, live, rel, tol)
    weight = (w * temperature).squeeze(dim)
    return Loss("cross_entropy", hard, weight, dim, temperature=temperature, certain=certain)


def _by_label(weights: Tensor, labels: Tensor, n: int, rel: float, tol: float) -> bool:
    """Whether places of one label have one weight."""
    count = weights.new_zeros(n).index_add_(0, labels, torch.ones_like(weights))
    mean = weights.new_zeros(n).index_add_(0, labels, weights) / count.clamp_min(1)
    fits = bool(((weights - mean[labels]).abs() <= rel * mean[labels]).all())
    return fits and len(weights) - int((count > 0).sum()) >= enough(tol)


def _by_sample(w: Tensor, live: Tensor, rel: float, tol: float) -> bool:
    """Whether the places of one sample have one weight."""
    w, live = w.reshape(len(w), -1), live.reshape(len(w), -1)
    count = live.sum(1)
    mean = (w * live).sum(1, keepdim=True) / count.clamp_min(1).unsqueeze(1)
    fits = bool((((w - mean).abs() <= rel * mean) | ~live).all())
    return fits and int(count.sum()) - int((count > 0).sum()) >= enough(tol)


def _smoothed(s: Tensor, q: Tensor, dim: int, uniform: float, tol: float) -> Iterator[Loss]:
    """Label smoothing at any scale, also with class weights, and targets with zeros (mixed samples) at any scale."""
    shape = s.movedim(dim, -1).shape
    rows = [x.movedim(dim, -1).reshape(-1, shape[-1]).double() for x in (s, q)]
    live = rows[1].abs().amax(1) > 0
    if not bool(live.any()):
        return
    S, Q = rows[0][live], rows[1][live]
    found = _equal_off_label(S, Q, uniform, tol)
    if found is None:
        found = _zeros_in_targets(S, Q, tol)
    if found is None and shape[-1] <= MOST_CLASSES:
        found = _class_weights_and_smoothing(S, Q, uniform, tol)
    if found is None:
        return
    if found.numel() == 1 and abs(float(found) - uniform) <= tol * uniform and bool(live.all()):
        yield Loss("cross_entropy", _sharpen(s - q / uniform, dim), uniform, dim)
        return
    w = rows[1].new_zeros(len(live), 1)
    w[live] = found.reshape(-1, 1) if found.numel() > 1 else found
    t = torch.where(w > 0, rows[0] - rows[1] / w.clamp_min(1e-300), rows[0])
    t = t.reshape(shape).movedim(-1, dim).to(s.dtype)
    yield Loss("cross_entropy", _sharpen(t, dim), w.reshape(shape[:-1]).to(s.dtype), dim)


def _equal_off_label(S: Tensor, Q: Tensor, uniform: float, tol: float) -> Tensor | None:
    """The common weight w where the targets off the label are the same at all places: q = w s - b_j there."""
    for first in ((S - Q / uniform).argmax(1), Q.argmin(1)):
        label = first
        for _ in range(3):
            off = torch.ones_like(S).scatter_(1, label[:, None], 0.0)
            number = off.sum(0).clamp_min(1)
            centred_s = (S - (S * off).sum(0) / number) * off
            centred_q = (Q - (Q * off).sum(0) / number) * off
            w = (centred_s * centred_q).sum() / centred_s.square().sum().clamp_min(1e-300)
            if not bool(w > 0):
                break
            label = (S - Q / w).argmax(1)
        if not bool(w > 0):
            continue
        t = S - Q / w
        fits = bool(((centred_q - w * centred_s).abs() <= tol * w).all()) and bool((t > -tol).all())
        if fits and int((centred_s.abs() > 5 * tol).sum()) - 2 * S.shape[1] >= enough(tol):
            return w
    return None


def _zeros_in_targets(S: Tensor, Q: Tensor, tol: float) -> Tensor | None:
    """The common weight w where many targets are zero: q / s is at most w, and w for those."""
    large = S.gt(max(0.02, 5 * tol))
    if not bool(large.any()):
        return None
    w = (Q[large] / S[large]).amax()
    if not bool(w > 0):
        return None
    t = S - Q / w
    zeros = int((large & (t.abs() <= tol)).sum())
    return w if bool((t > -tol).all()) and zeros >= max(enough(tol) + 2, 0.2 * int(large.sum())) else None


def _class_weights_and_smoothing(S: Tensor, Q: Tensor, uniform: float, tol: float) -> Tensor | None:
    """Weights w by label, and targets off the label by class: q_ij = w_{y_i} s_ij - b_j for j other than y_i."""
    n = S.shape[1]
    some = slice(0, MOST_PLACES)
    for first in (Q.argmin(1), (S - Q / uniform).argmax(1)):
        label = first
        for _ in range(3):
            P, L = S[some], label[some]
            off = torch.ones_like(P, dtype=torch.bool).scatter_(1, L[:, None], False)
            design = P.new_zeros(*P.shape, 2 * n)
            design.scatter_(2, L[:, None, None].expand(-1, n, 1), P[:, :, None])
            design[:, torch.arange(n), n + torch.arange(n)] = -1.0
            equations, right = design[off].cpu(), Q[some][off].cpu()
            x = torch.linalg.lstsq(equations, right[:, None], driver="gelsd").solution[:, 0].to(S)
            w, b = x[:n][label], x[n:]
            if not bool((w > 0).all()):
                break
            label = (S - Q / w[:, None]).argmax(1)
        if not bool((w > 0).all()):
            continue
        off = torch.ones_like(S, dtype=torch.bool).scatter_(1, label[:, None], False)
        t = S - Q / w[:, None]
        fits = bool((((w[:, None] * S - Q - b).abs() <= tol * w.amax()) | ~off).all()) and bool((t > -tol).all())
        if fits and int((S[off] > 5 * tol).sum()) - 4 * n >= enough(tol):
            return w
    return None


def _with_temperature(z: Tensor, q: Tensor, dim: int, tol: float) -> Iterator[Loss]:
    """Hard targets and softmax(z / T): off the label log q is linear in z, with slope 1 / T."""
    label = q.argmin(dim, keepdim=True)
    top = q.abs().amax()
    off = ~_one_hot(label, q, dim).bool() & (q > 10 * tol * top)
    # the logarithm of a small gradient is inaccurate: each counts by the square of its size
    counts = torch.where(off, q / top, 0.0).double().square()
    number = counts.sum(dim, keepdim=True).clamp_min(1e-300)
    log_q = torch.where(off, q.clamp_min(torch.finfo(q.dtype).tiny).log(), 0.0).double()
    centred_z = z.double() - (counts * z).sum(dim, keepdim=True) / number
    centred_q = log_q - (counts * log_q).sum(dim, keepdim=True) / number
    slope = (counts * centred_z * centred_q).sum()
    inverse = float(slope / (counts * centred_z.square()).sum().clamp_min(1e-300))
    varies = (counts * centred_q.square()).sum() > (10 * tol) ** 2 * counts.sum()  # by more than rounding
    if not inverse > 0 or not bool(varies):
        return
    found = _weighted(torch.softmax(z * inverse, dim), q, dim, tol, 1 / inverse)
    if found is not None:
        yield found


def _sharpen(t: Tensor, dim: int) -> Tensor:
    """Targets without rounding: those that are one-hot exactly so, the others on the simplex."""
    top, label = t.max(dim, keepdim=True)
    soft = t.clamp_min(0)
    return torch.where(top > 0.999, _one_hot(label, t, dim), soft / soft.sum(dim, keepdim=True))


def _one_hot(label: Tensor, like: Tensor, dim: int) -> Tensor:
    return torch.zeros_like(like).scatter_(dim, label, 1.0)
