"""Losses as people write them, at any scale and in any precision: recognised, or known not to be."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_forms import CERTAIN, OTHER, WITH_VALUE, Case, divergence
from torch import Tensor

from ddpnopt.ddp.evidence import within_reach
from ddpnopt.ddp.loss import AnyLoss, LinearLoss, Loss, UnknownLoss
from ddpnopt.ddp.loss_search import Form
from ddpnopt.ddp.recognise import FAR, recognise
from ddpnopt.ddp.recognise_binary import hard_targets

FACTORS = [1.0, 0.01, 100.0, 1 / 3]
NARROW = {torch.float16: 0.03, torch.bfloat16: 0.15}


@pytest.fixture(autouse=True)
def _single_precision(_fixed_ground: None) -> None:
    torch.set_default_dtype(torch.float32)


def found_in(case: Case, factor: float, dtype: torch.dtype, handed_over: bool) -> tuple[AnyLoss, Tensor]:
    """What is recognised, as the optimizer sees it: outputs and gradients in float32, computed in `dtype`."""
    z = case.z.to(dtype).requires_grad_()
    loss = factor * case.loss(z)
    q = torch.autograd.grad(loss, z)[0].float()
    seen = z.detach().float()
    return recognise(seen, q, True, float(loss.detach()) if handed_over else None, dtype), seen


def check_shares(found: AnyLoss, case: Case, z: Tensor, factor: float, rel: float) -> None:
    assert case.each is not None
    moved = z + 0.05 * torch.randn_like(z) if z.min() < 0 and z.max() > 0 else z  # not out of the probabilities
    for outputs in (z, moved):
        wanted = factor * case.each(outputs)
        torch.testing.assert_close(found.per_sample(outputs), wanted, rtol=rel, atol=rel * float(wanted.abs().mean()))


@pytest.mark.parametrize("handed_over", [False, True], ids=["", "value known"])
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("form", CERTAIN)
def test_recognised_from_the_gradient(form: str, factor: float, handed_over: bool) -> None:
    kind, build = CERTAIN[form]
    case = build()
    found, z = found_in(case, factor, torch.float32, handed_over)
    assert (found.kind, found.certain) == (kind, True)
    check_shares(found, case, z, factor, 1e-2)


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("form", WITH_VALUE)
def test_recognised_with_the_value_of_the_loss(form: str, factor: float) -> None:
    kind, build = WITH_VALUE[form]
    case = build()
    found, z = found_in(case, factor, torch.float32, True)
    assert (found.kind, found.certain) == (kind, True)
    check_shares(found, case, z, factor, 1e-3)


def test_the_divergence_from_soft_targets_is_recognised_without_a_factor() -> None:
    case = divergence()
    found, z = found_in(case, 1.0, torch.float32, True)
    assert (found.kind, found.certain) == ("cross_entropy", True)
    check_shares(found, case, z, 1.0, 1e-3)


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("form", [*CERTAIN, *WITH_VALUE])
def test_the_form_of_the_last_step_gives_the_same_losses_for_other_targets(form: str, factor: float) -> None:
    kind, build = (CERTAIN | WITH_VALUE)[form]
    first, _ = found_in(build(), factor, torch.float32, True)
    assert isinstance(first, Loss)
    case = build()
    z = case.z.requires_grad_()
    loss = factor * case.loss(z)
    q = torch.autograd.grad(loss, z)[0]
    found = recognise(z.detach(), q, True, float(loss.detach()), last=Form.of(first))
    assert (found.kind, found.certain) == (kind, True)
    check_shares(found, case, z.detach(), factor, 1e-2)


@pytest.mark.parametrize("form", [*CERTAIN, *WITH_VALUE])
@pytest.mark.parametrize("before", ["smoothing", "teacher", "temperature", "binary, pixels", "binary, probabilities"])
def test_the_form_of_the_last_step_hides_no_other_form(form: str, before: str) -> None:
    first, _ = found_in((CERTAIN | WITH_VALUE)[before][1](), 1.0, torch.float32, True)
    assert isinstance(first, Loss)
    kind, build = (CERTAIN | WITH_VALUE)[form]
    case = build()
    z = case.z.requires_grad_()
    loss = case.loss(z)
    q = torch.autograd.grad(loss, z)[0]
    found = recognise(z.detach(), q, True, float(loss.detach()), last=Form.of(first))
    assert (found.kind, found.certain) == (kind, True)
    check_shares(found, case, z.detach(), 1.0, 1e-2)


@pytest.mark.parametrize("form", [*CERTAIN, *WITH_VALUE])
def test_a_sum_of_outputs_in_the_last_step_hides_no_other_form(form: str) -> None:
    before = Form.of(LinearLoss(torch.ones(24, 1), 0.0))
    kind, build = (CERTAIN | WITH_VALUE)[form]
    case = build()
    z = case.z.requires_grad_()
    loss = case.loss(z)
    q = torch.autograd.grad(loss, z)[0]
    found = recognise(z.detach(), q, True, float(loss.detach()), last=before)
    assert (found.kind, found.certain) == (kind, True)


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("form", [*CERTAIN, *WITH_VALUE])
@pytest.mark.parametrize("before", ["logits", "probabilities"])
def test_the_form_of_the_last_step_changes_nothing_where_the_value_is_not_known(
    form: str, before: str, factor: float
) -> None:
    last = Form("binary_cross_entropy", 0.1, -1, 1.0, of_probabilities=before == "probabilities")
    case = (CERTAIN | WITH_VALUE)[form][1]()
    z = case.z.requires_grad_()
    q = torch.autograd.grad(factor * case.loss(z), z)[0]
    found, wanted = (recognise(z.detach(), q, True, last=each) for each in (last, None))
    assert (found.kind, found.certain) == (wanted.kind, wanted.certain)
    torch.testing.assert_close(found.per_sample(z.detach()), wanted.per_sample(z.detach()), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("form", WITH_VALUE)
def test_not_certain_without_the_value_of_the_loss(form: str) -> None:
    found, _ = found_in(WITH_VALUE[form][1](), 1.0, torch.float32, False)
    assert not found.certain


@pytest.mark.parametrize("handed_over", [False, True], ids=["", "value known"])
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("form", OTHER)
def test_other_losses_are_not_certain_and_have_the_right_gradient(form: str, factor: float, handed_over: bool) -> None:
    case = OTHER[form]()
    found, z = found_in(case, factor, torch.float32, handed_over)
    assert not found.certain
    if handed_over:
        assert found.kind == "unknown"
        total = factor * float(case.loss(z))
        within = (
            FAR * factor * within_reach(z, torch.autograd.grad(case.loss(leaf := z.clone().requires_grad_()), leaf)[0])
        )
        assert float(found.per_sample(z).sum()) == pytest.approx(min(abs(total), within), rel=1e-4)
    moved, copy = z.clone().requires_grad_(), z.clone().requires_grad_()
    ours = torch.autograd.grad(found.per_sample(moved).sum(), moved)[0]
    theirs = torch.autograd.grad(factor * case.loss(copy), copy)[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4 * float(theirs.abs().max()))


EXACT_ONLY = {"smoothing and class weights", "temperature", "cosines", "binary, pos_weight per column"}
"""Too many unknowns for three digits."""


@pytest.mark.parametrize("dtype", NARROW, ids=["float16", "bfloat16"])
@pytest.mark.parametrize("factor", [1.0, 0.01])
@pytest.mark.parametrize("form", sorted(set(CERTAIN) - EXACT_ONLY))
def test_recognised_in_half_precision(form: str, factor: float, dtype: torch.dtype) -> None:
    kind, build = CERTAIN[form]
    case = build()
    found, z = found_in(case, factor, dtype, False)
    assert (found.kind, found.certain) == (kind, True)
    wanted = factor * float(case.each(z).sum()) if case.each is not None else 0.0
    assert float(found.per_sample(z).sum()) == pytest.approx(wanted, rel=NARROW[dtype])


@settings(max_examples=30, deadline=None)
@given(st.floats(-4, 4), st.sampled_from(["classes", "smoothing", "class weights", "binary", "temperature"]))
def test_any_scale_of_the_loss_is_found(exponent: float, form: str) -> None:
    torch.manual_seed(0)
    kind, build = CERTAIN[form]
    case, factor = build(), 10.0**exponent
    found, z = found_in(case, factor, torch.float32, False)
    assert (found.kind, found.certain) == (kind, True)
    check_shares(found, case, z, factor, 1e-2)


@settings(max_examples=30, deadline=None)
@given(st.floats(-4, 4), st.booleans())
def test_shares_of_a_squared_error_are_right_at_any_scale_once_its_value_is_known(
    exponent: float, masked: bool
) -> None:
    torch.manual_seed(0)
    case, factor = WITH_VALUE["squared, masked" if masked else "squared"][1](), 10.0**exponent
    found, z = found_in(case, factor, torch.float32, True)
    assert case.each is not None
    torch.testing.assert_close(found.per_sample(z), factor * case.each(z), rtol=1e-3, atol=1e-4 * factor)


def test_a_penalty_on_the_weights_leaves_a_cross_entropy_certain() -> None:
    case = CERTAIN["classes"][1]()
    z = case.z.clone().requires_grad_()
    loss = case.loss(z)
    q = torch.autograd.grad(loss, z)[0]
    assert recognise(z, q, True, float(loss) + 0.3).certain
    smaller = recognise(z, q, True, float(loss) - 0.3)
    assert (smaller.kind, smaller.certain) == ("cross_entropy", False)


def test_equal_outputs_do_not_make_an_absolute_error_a_binary_cross_entropy() -> None:
    z, t = torch.zeros(24, 4, requires_grad=True), torch.randn(24, 4)
    q = torch.autograd.grad((z - t).abs().mean(), z)[0]
    assert recognise(z, q, True).kind == "unknown"


def test_few_numbers_are_no_evidence() -> None:
    z, t = torch.tensor([[0.3]], requires_grad=True), torch.tensor([[1.2]])
    q = torch.autograd.grad(3 * (z - t).square().sum(), z)[0]
    found = recognise(z, q, True)
    assert (found.kind, found.certain) == ("squared_error", False)


def test_an_unknown_loss_is_the_square_of_a_linear_residual() -> None:
    z, q = torch.randn(6, 3), torch.randn(6, 3)
    q[2] = 0
    found = UnknownLoss.adding_up_to(5.0, z, q)
    phi = found.per_sample(z)
    assert float(phi.sum()) == pytest.approx(5.0, rel=1e-5)
    torch.testing.assert_close(phi / phi.sum(), q.square().sum(1) / q.square().sum())
    step = torch.randn(6, 3)
    r = (2 * phi).sqrt()
    live = torch.arange(6) != 2
    wanted = (r + (q * step).sum(1) / r).square() / 2
    torch.testing.assert_close(found.per_sample(z + step)[live], wanted[live])
    assert float(found.per_sample(z + step)[2]) == 0
    torch.testing.assert_close(found.scaled(0.5).per_sample(z + step), 0.5 * found.per_sample(z + step))


def test_scaled_losses() -> None:
    z, y = torch.randn(6, 3), torch.randn(6, 3)
    loss = Loss("squared_error", y, 0.25)
    torch.testing.assert_close(loss.scaled(4).per_sample(z), (z - y).square().sum(1))


@pytest.mark.parametrize("factor", FACTORS)
def test_a_temperature_is_found_when_nearly_all_samples_are_fitted(factor: float) -> None:
    y = torch.randint(10, (64,))
    z = 4 * torch.randn(64, 10)
    z[torch.arange(64), y] += 25  # two samples of 64 have most of the gradient
    case = Case(z, lambda z: F.cross_entropy(z / 2.5, y), lambda z: F.cross_entropy(z / 2.5, y, reduction="none") / 64)
    for handed_over in (False, True):
        found, z = found_in(case, factor, torch.float32, handed_over)
        assert isinstance(found, Loss)
        assert (found.kind, found.certain) == ("cross_entropy", True)
        assert found.temperature == pytest.approx(2.5, rel=1e-3)
        check_shares(found, case, z, factor, 1e-2)


def test_a_group_of_one_small_element_does_not_make_other_gradients_a_binary_cross_entropy() -> None:
    y = torch.arange(64) % 10
    z = 3 * torch.randn(64, 10)
    z[torch.arange(64), y] += 15
    z = z.requires_grad_()
    q = torch.autograd.grad(F.cross_entropy(z / 2.5, y), z)[0].detach()
    p = torch.sigmoid(z.detach())
    assert hard_targets(p, torch.sigmoid(-z.detach()), q, 1e-4) is None


def test_a_loss_below_zero_is_taken_alike_at_any_scale() -> None:
    z, t = torch.randn(24, 2), 0.1 * torch.randn(24)
    z[:, 1] -= 3

    def loss(z: Tensor) -> Tensor:
        return F.gaussian_nll_loss(0.1 * z[:, 0], t, F.softplus(z[:, 1]))

    shares = []
    for factor in (1.0, 0.01, 100.0):
        found, seen = found_in(Case(z, loss), factor, torch.float32, True)
        assert float(loss(seen)) < 0
        assert (found.kind, found.certain) == ("unknown", False)
        shares.append(found.per_sample(seen) / factor)
    torch.testing.assert_close(shares[1], shares[0])
    torch.testing.assert_close(shares[2], shares[0])


def test_an_unknown_loss_whose_gradient_vanishes_does_not_ask_for_outputs_far_away() -> None:
    t = (torch.rand(24, 8) < 0.5).float()

    def dice(z: Tensor) -> Tensor:
        p = torch.sigmoid(z)
        return 1 - ((2 * (p * t).sum(1) + 1) / (p.sum(1) + t.sum(1) + 1)).mean()

    found, z = found_in(Case(12 * torch.randn(24, 8).sign() + torch.randn(24, 8), dice), 1.0, torch.float32, True)
    assert isinstance(found, UnknownLoss)
    assert float(dice(z)) > 0.2
    wanted = found.residual.square() / found.q.norm(dim=1).clamp_min(1e-30)  # how far the outputs would have to go
    share = found.q.norm(dim=1) / found.q.norm(dim=1).sum()
    assert float((share * wanted).sum()) < 100 * float(z.norm(dim=1).mean())


@pytest.mark.parametrize("factor", FACTORS)
def test_a_hinge_over_classes_is_not_a_cross_entropy_at_a_high_temperature(factor: float) -> None:
    y = torch.randint(10, (64,))
    found, _ = found_in(
        Case(0.1 * torch.randn(64, 10), lambda z: F.multi_margin_loss(z, y)), factor, torch.float32, True
    )
    assert (found.kind, found.certain) == ("unknown", False)
