"""Losses as people write them, each with the loss of every sample for reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

B = 24


@dataclass(frozen=True)
class Case:
    """Outputs, the batch loss as a function of them, and the loss of each sample (B,) above its minimum."""

    z: Tensor
    loss: Callable[[Tensor], Tensor]
    each: Callable[[Tensor], Tensor] | None = None


def _entropy(t: Tensor, dim: int = -1) -> Tensor:
    return -torch.xlogy(t, t).sum(dim)


def _labels(n: int, *more: int) -> Tensor:
    return (
        torch.arange(B).view(-1, *[1] * len(more)).expand(B, *more).contiguous().add(torch.randint(n, (B, *more))) % n
    )


def classes(reduction: str = "mean") -> Case:
    z, y = 2 * torch.randn(B, 5), _labels(5)
    n = B if reduction == "mean" else 1
    return Case(
        z,
        lambda z: F.cross_entropy(z, y, reduction=reduction),
        lambda z: F.cross_entropy(z, y, reduction="none") / n,
    )


def class_weights(n: int = 5) -> Case:
    z, y, w = 2 * torch.randn(B, n), _labels(n), torch.rand(n) + 0.2
    return Case(
        z,
        lambda z: F.cross_entropy(z, y, w.to(z)),
        lambda z: F.cross_entropy(z, y, w.to(z), reduction="none") / w[y].sum(),
    )


def ignored_labels() -> Case:
    z, y = 2 * torch.randn(B, 5), _labels(5)
    y[::5] = -100
    return Case(z, lambda z: F.cross_entropy(z, y), lambda z: F.cross_entropy(z, y, reduction="none") / (y >= 0).sum())


def smoothing(n: int = 5) -> Case:
    z, y = 2 * torch.randn(B, n), _labels(n)
    t = F.one_hot(y, n) * 0.9 + 0.1 / n
    return Case(
        z,
        lambda z: F.cross_entropy(z, y, label_smoothing=0.1),
        lambda z: (F.cross_entropy(z, t.to(z), reduction="none") - _entropy(t)) / B,
    )


def smoothing_and_class_weights() -> Case:
    z, y, w = 2 * torch.randn(B, 4), _labels(4), torch.tensor([0.5, 1.0, 2.0, 0.7])
    parts = (F.one_hot(y, 4) * 0.9 * w[y][:, None] + 0.1 / 4 * w) / w[y].sum()
    size = parts.sum(1)

    def each(z: Tensor) -> Tensor:
        t = parts / size[:, None]
        return size * ((-t * F.log_softmax(z, 1)).sum(1) - _entropy(t))

    return Case(z, lambda z: F.cross_entropy(z, y, w.to(z), label_smoothing=0.1), each)


def mixed_samples() -> Case:
    z, y = 2 * torch.randn(B, 5), _labels(5)
    t = 0.7 * F.one_hot(y, 5) + 0.3 * F.one_hot(y.roll(1), 5)
    return Case(
        z,
        lambda z: F.cross_entropy(z, t.to(z)),
        lambda z: (F.cross_entropy(z, t.to(z), reduction="none") - _entropy(t)) / B,
    )


def teacher() -> Case:
    z, t = 2 * torch.randn(B, 5), torch.softmax(torch.randn(B, 5), 1)
    return Case(
        z,
        lambda z: F.cross_entropy(z, t.to(z)),
        lambda z: (F.cross_entropy(z, t.to(z), reduction="none") - _entropy(t)) / B,
    )


def divergence() -> Case:
    z, t = 2 * torch.randn(B, 5), torch.softmax(torch.randn(B, 5), 1)
    return Case(
        z,
        lambda z: F.kl_div(F.log_softmax(z, 1), t.to(z), reduction="batchmean"),
        lambda z: F.kl_div(F.log_softmax(z, 1), t.to(z), reduction="none").sum(1) / B,
    )


def tokens(ignored: bool = False) -> Case:
    z, y = 2 * torch.randn(B, 6, 5), _labels(5, 6)
    if ignored:
        y[:, 4:] = -100
    return Case(
        z,
        lambda z: F.cross_entropy(z.reshape(-1, 5), y.reshape(-1)),
        lambda z: F.cross_entropy(z.reshape(-1, 5), y.reshape(-1), reduction="none").view(B, 6).sum(1) / (y >= 0).sum(),
    )


def pixels() -> Case:
    z, y = 2 * torch.randn(B, 4, 3, 3), _labels(4, 3, 3)
    return Case(
        z,
        lambda z: F.cross_entropy(z, y),
        lambda z: F.cross_entropy(z, y, reduction="none").flatten(1).sum(1) / y.numel(),
    )


def log_probabilities() -> Case:
    z, y = F.log_softmax(2 * torch.randn(B, 5), 1), _labels(5)
    return Case(z, lambda z: F.nll_loss(z, y), lambda z: F.nll_loss(z, y, reduction="none") / B)


def probabilities() -> Case:
    z, y = torch.softmax(2 * torch.randn(B, 5), 1), _labels(5)
    return Case(z, lambda z: F.nll_loss(z.log(), y), lambda z: F.nll_loss(z.log(), y, reduction="none") / B)


def temperature() -> Case:
    z, y = 3 * torch.randn(B, 5), _labels(5)
    return Case(z, lambda z: F.cross_entropy(z / 2.5, y), lambda z: F.cross_entropy(z / 2.5, y, reduction="none") / B)


def cosines() -> Case:
    z, y = F.normalize(torch.randn(B, 5)), _labels(5)
    return Case(z, lambda z: F.cross_entropy(20 * z, y), lambda z: F.cross_entropy(20 * z, y, reduction="none") / B)


def binary(divisor: int = 4 * B, soft: str = "", **options: Tensor) -> Case:
    z, t = 2 * torch.randn(B, 4), torch.randint(2, (B, 4)).float()
    t[:2] = torch.tensor([[0.0, 1.0, 0.0, 1.0], [1.0, 0.0, 1.0, 0.0]])  # each column has both targets
    if soft == "smoothed":
        t = 0.9 * t + 0.05
    elif soft == "pixels":
        t = torch.rand(B, 4) * torch.randint(2, (B, 4))
    elif soft:
        t = torch.rand(B, 4) * 0.9 + 0.05

    def each(z: Tensor, t: Tensor = t) -> Tensor:
        given = {name: value.to(z) for name, value in options.items()}
        parts = F.binary_cross_entropy_with_logits(z, t.to(z), reduction="none", **given)
        least = _entropy(torch.stack([t, 1 - t]).to(z), 0) if soft else torch.zeros(B, 4)
        return (parts - least).sum(1) / divisor

    def loss(z: Tensor) -> Tensor:
        given = {name: value.to(z) for name, value in options.items()}
        return F.binary_cross_entropy_with_logits(z, t.to(z), reduction="sum", **given) / divisor

    return Case(z, loss, each)


def binary_probabilities() -> Case:
    z, t = torch.sigmoid(2 * torch.randn(B, 4)), torch.randint(2, (B, 4)).float()
    return Case(
        z,
        lambda z: F.binary_cross_entropy(z, t.to(z)),
        lambda z: F.binary_cross_entropy(z, t.to(z), reduction="none").sum(1) / z.numel(),
    )


def squared(divisor: int = 4 * B, masked: bool = False) -> Case:
    z, t = torch.randn(B, 4), torch.randn(B, 4)
    mask = torch.ones(B, 4, dtype=torch.bool)
    if masked:
        mask.view(-1)[torch.randperm(4 * B)[:53]] = False
    divisor = int(mask.sum()) if masked else divisor
    return Case(
        z,
        lambda z: ((z - t.to(z)).square() * mask).sum() / divisor,
        lambda z: ((z - t.to(z)).square() * mask).sum(1) / divisor,
    )


def _targets() -> tuple[Tensor, Tensor]:
    return torch.randn(B, 4), torch.randn(B, 4)


def absolute() -> Case:
    z, t = _targets()
    return Case(z, lambda z: F.l1_loss(z, t.to(z)))


def huber() -> Case:
    z, t = _targets()
    return Case(z, lambda z: F.huber_loss(z, t.to(z), delta=0.5))


def hinge() -> Case:
    z, y = torch.randn(B, 4), torch.randint(2, (B, 4)) * 2 - 1
    return Case(z, lambda z: (1 - y * z).clamp_min(0).mean())


def focal() -> Case:
    z, y = 2 * torch.randn(B, 5), _labels(5)

    def loss(z: Tensor) -> Tensor:
        log_p = -F.cross_entropy(z, y, reduction="none")
        return (-((1 - log_p.exp()) ** 2) * log_p).mean()

    return Case(z, loss)


def gaussian() -> Case:
    z, t = torch.randn(B, 2), torch.randn(B)
    return Case(z, lambda z: F.gaussian_nll_loss(z[:, 0], t.to(z), F.softplus(z[:, 1])))


def sum_of_two() -> Case:
    z, y, t = torch.randn(B, 5), _labels(5), torch.randn(B, 5)
    return Case(z, lambda z: F.cross_entropy(z, y) + F.mse_loss(z, t.to(z)))


def contrastive() -> Case:
    z = torch.randn(B, 6)

    def loss(z: Tensor) -> Tensor:
        near = F.normalize(z[: B // 2]) @ F.normalize(z[B // 2 :]).T
        return F.cross_entropy(near / 0.1, torch.arange(B // 2))

    return Case(z, loss)


POSITIVES = torch.tensor([0.5, 2.0, 3.0, 7.0])
CE, BCE, SE = "cross_entropy", "binary_cross_entropy", "squared_error"
CERTAIN: dict[str, tuple[str, Callable[[], Case]]] = {
    "classes": (CE, classes),
    "classes, sum": (CE, lambda: classes("sum")),
    "class weights": (CE, class_weights),
    "class weights, two classes": (CE, lambda: class_weights(2)),
    "ignored labels": (CE, ignored_labels),
    "smoothing": (CE, smoothing),
    "smoothing, two classes": (CE, lambda: smoothing(2)),
    "smoothing and class weights": (CE, smoothing_and_class_weights),
    "mixed samples": (CE, mixed_samples),
    "tokens": (CE, tokens),
    "tokens, some ignored": (CE, lambda: tokens(ignored=True)),
    "pixels": (CE, pixels),
    "log probabilities": (CE, log_probabilities),
    "probabilities": (CE, probabilities),
    "temperature": (CE, temperature),
    "cosines": (CE, cosines),
    "binary": (BCE, binary),
    "binary, sum over the batch": (BCE, lambda: binary(B)),
    "binary, pos_weight": (BCE, lambda: binary(pos_weight=torch.tensor(3.0))),
    "binary, pos_weight per column": (BCE, lambda: binary(pos_weight=POSITIVES)),
    "binary, weight per sample": (BCE, lambda: binary(weight=torch.rand(B, 1) + 0.1)),
    "binary, smoothed": (BCE, lambda: binary(soft="smoothed")),
    "binary, pixels": (BCE, lambda: binary(soft="pixels")),
    "binary, probabilities": (BCE, binary_probabilities),
}
"""Recognised from the gradient alone."""
WITH_VALUE: dict[str, tuple[str, Callable[[], Case]]] = {
    "teacher": (CE, teacher),
    "binary, soft": (BCE, lambda: binary(soft="dense")),
    "squared": (SE, squared),
    "squared, sum over the batch": (SE, lambda: squared(B)),
    "squared, sum": (SE, lambda: squared(1)),
    "squared, masked": (SE, lambda: squared(masked=True)),
}
"""Recognised for certain once the value of the loss is known."""
OTHER: dict[str, Callable[[], Case]] = {
    "absolute": absolute,
    "huber": huber,
    "hinge": hinge,
    "focal": focal,
    "gaussian": gaussian,
    "sum of two": sum_of_two,
    "contrastive": contrastive,
}
"""Not recognised."""
