"""The user's loss is recognised from outputs and gradients alone, and shared out among the samples."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ddpnopt.ddp.loss import AnyLoss, Loss
from ddpnopt.ddp.recognise import recognise

Function = Callable[[Tensor], Tensor]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}


def seen(z: Tensor, loss: Function, mean: bool = True) -> AnyLoss:
    z = z.clone().requires_grad_()
    q = torch.autograd.grad(loss(z), z)[0]
    return recognise(z, q, mean)


def check(z: Tensor, loss: Function, kind: str, mean: bool = True, least: Tensor | float = 0.0) -> Loss:
    """Shares add up to the loss above its minimum, at these outputs and at others."""
    found = seen(z, loss, mean)
    assert isinstance(found, Loss)
    assert found.kind == kind
    shares = found.per_sample(z)
    assert shares.shape == (len(z),)
    assert (shares >= -TOLERANCE[z.dtype]).all()
    for outputs in (z, z + 0.1 * torch.randn_like(z)):
        wanted = float(loss(outputs)) - float(least)
        assert float(found.per_sample(outputs).sum()) == pytest.approx(wanted, rel=TOLERANCE[z.dtype])
    return found


def logits(*shape: int, dtype: torch.dtype, spread: float = 2.0) -> Tensor:
    return spread * torch.randn(*shape, dtype=dtype)


@DTYPES
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("classes", [2, 3, 10])
def test_cross_entropy_with_hard_labels(classes: int, reduction: str, dtype: torch.dtype) -> None:
    z, y = logits(12, classes, dtype=dtype), torch.randint(classes, (12,))
    found = check(z, lambda z: F.cross_entropy(z, y, reduction=reduction), "cross_entropy", reduction == "mean")
    assert torch.equal(found.target, F.one_hot(y, classes).to(dtype))
    each = F.cross_entropy(z, y, reduction="none") / (12 if reduction == "mean" else 1)
    torch.testing.assert_close(found.per_sample(z), each, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@DTYPES
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.05, 0.1, 0.4])
@pytest.mark.parametrize("classes", [2, 5])
def test_cross_entropy_with_label_smoothing(classes: int, smoothing: float, reduction: str, dtype: torch.dtype) -> None:
    z, y = logits(12, classes, dtype=dtype), torch.randint(classes, (12,))
    t = F.one_hot(y, classes).to(dtype) * (1 - smoothing) + smoothing / classes
    entropy = -(t * t.log()).sum() / (12 if reduction == "mean" else 1)

    def loss(z: Tensor) -> Tensor:
        return F.cross_entropy(z, y, label_smoothing=smoothing, reduction=reduction)

    check(z, loss, "cross_entropy", reduction == "mean", entropy)


@DTYPES
def test_cross_entropy_with_probabilities_as_targets(dtype: torch.dtype) -> None:
    z, t = logits(6, 4, dtype=dtype), torch.softmax(logits(6, 4, dtype=dtype), 1)
    check(z, lambda z: F.cross_entropy(z, t), "cross_entropy", True, -(t * t.log()).sum() / 6)


@DTYPES
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("weights", [[0.2, 1.0, 3.0], [0.2, 0.5, 1.0], [2.0, 1.0, 1.0]], ids=str)
@pytest.mark.parametrize("spread", [1.0, 6.0])
def test_cross_entropy_with_class_weights(
    spread: float, weights: list[float], reduction: str, dtype: torch.dtype
) -> None:
    z, y = logits(12, 3, dtype=dtype, spread=spread), torch.arange(12) % 3
    weight = torch.tensor(weights, dtype=dtype)
    check(z, lambda z: F.cross_entropy(z, y, weight, reduction=reduction), "cross_entropy", reduction == "mean")


@DTYPES
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_cross_entropy_with_ignored_labels(reduction: str, dtype: torch.dtype) -> None:
    z, y = logits(12, 4, dtype=dtype), torch.arange(12) % 4
    y[[0, 5, 6]] = -100
    found = seen(z, lambda z: F.cross_entropy(z, y, reduction=reduction), reduction == "mean")
    assert found.kind == "cross_entropy"
    expected = F.cross_entropy(z, y, reduction="none") / (9 if reduction == "mean" else 1)
    torch.testing.assert_close(found.per_sample(z), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@DTYPES
@pytest.mark.parametrize("factor", [0.3, 0.5, 2.0])
def test_cross_entropy_times_a_factor(factor: float, dtype: torch.dtype) -> None:
    z, y = logits(12, 4, dtype=dtype), torch.arange(12) % 4
    check(z, lambda z: factor * F.cross_entropy(z, y), "cross_entropy")


@DTYPES
@pytest.mark.parametrize("ignored", [False, True])
def test_sequences_flattened_by_the_user(ignored: bool, dtype: torch.dtype) -> None:
    z, y = logits(4, 6, 5, dtype=dtype), torch.randint(5, (4, 6))
    if ignored:
        y[:, 4:] = -100
    found = seen(z, lambda z: F.cross_entropy(z.view(-1, 5), y.view(-1)))
    assert found.kind == "cross_entropy"
    each = F.cross_entropy(z.view(-1, 5), y.view(-1), reduction="none").view(4, 6).sum(1) / (y >= 0).sum()
    torch.testing.assert_close(found.per_sample(z), each, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@DTYPES
@pytest.mark.parametrize("shape", [(3, 4, 5, 6), (3, 4, 7), (3, 5, 5, 5)])
def test_classes_in_dimension_one_with_pixels_behind(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    z, y = logits(*shape, dtype=dtype), torch.randint(shape[1], (shape[0], *shape[2:]))
    found = check(z, lambda z: F.cross_entropy(z, y), "cross_entropy")
    assert found.dim == 1


@DTYPES
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("shape", [(9,), (9, 1), (9, 4)])
def test_binary_cross_entropy_with_logits(shape: tuple[int, ...], reduction: str, dtype: torch.dtype) -> None:
    z, y = logits(*shape, dtype=dtype), torch.randint(2, shape).to(dtype)

    def loss(z: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(z, y, reduction=reduction)

    check(z, loss, "binary_cross_entropy", reduction == "mean")


@DTYPES
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("shape", [(9,), (9, 1), (9, 4), (5, 3, 4)])
def test_squared_error(shape: tuple[int, ...], reduction: str, dtype: torch.dtype) -> None:
    z, y = logits(*shape, dtype=dtype), logits(*shape, dtype=dtype)
    found = check(z, lambda z: F.mse_loss(z, y, reduction=reduction), "squared_error", reduction == "mean")
    torch.testing.assert_close(found.target, y, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@DTYPES
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("loss", ["cross entropy", "binary", "squared"])
@pytest.mark.parametrize("all_of_them", [True, False])
def test_perfectly_fitted_samples_have_a_share_of_about_zero(
    all_of_them: bool, loss: str, reduction: str, dtype: torch.dtype
) -> None:
    y = torch.arange(8) % 3
    hot = F.one_hot(y, 3).to(dtype)
    z = 2000 * hot - 1000 if loss != "squared" else hot.clone()
    fitted = torch.ones(8, dtype=torch.bool)
    if not all_of_them:
        fitted[3:5] = False
        z[3:5] = torch.randn(2, 3, dtype=dtype)
    function: Function = {
        "cross entropy": lambda z: F.cross_entropy(z, y, reduction=reduction),
        "binary": lambda z: F.binary_cross_entropy_with_logits(z, hot, reduction=reduction),
        "squared": lambda z: F.mse_loss(z, hot, reduction=reduction),
    }[loss]
    found = seen(z, function, reduction == "mean")
    shares = found.per_sample(z)
    assert shares.isfinite().all()
    rounding = 4 * torch.finfo(dtype).eps
    assert (shares[fitted].abs() < rounding).all()
    assert float(shares.sum()) == pytest.approx(float(function(z)), rel=TOLERANCE[dtype], abs=8 * rounding)


@DTYPES
def test_almost_fitted_samples_keep_the_digits_of_their_loss(dtype: torch.dtype) -> None:
    y = torch.arange(6) % 3
    z = 8.0 * F.one_hot(y, 3).to(dtype) + 0.1 * torch.randn(6, 3, dtype=dtype)
    found = check(z, lambda z: F.cross_entropy(z, y), "cross_entropy")
    each = F.cross_entropy(z, y, reduction="none") / 6
    torch.testing.assert_close(found.per_sample(z), each, rtol=1e-3, atol=0)


def test_another_loss_is_taken_for_one_with_the_same_gradient() -> None:
    z, y = torch.randn(6, 3), torch.randn(6, 3)
    found = seen(z, lambda z: F.smooth_l1_loss(z, y, beta=0.1))
    assert (found.kind, found.certain) == ("unknown", False)
    moved = z.clone().requires_grad_()
    ours = torch.autograd.grad(found.per_sample(moved).sum(), moved)[0]
    moved = z.clone().requires_grad_()
    theirs = torch.autograd.grad(F.smooth_l1_loss(moved, y, beta=0.1), moved)[0]
    torch.testing.assert_close(ours, theirs)
