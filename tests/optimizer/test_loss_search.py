"""Rare forms of losses are not tried at every step where none of them fits, and found again when one does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt import DDPNOpt
from ddpnopt import _losses as losses_module
from ddpnopt._losses import Losses, recognised_losses
from ddpnopt.ddp import recognise as search_module
from ddpnopt.ddp.loss import Loss
from ddpnopt.ddp.loss_search import AGAIN, NO_FORM, TRIES
from ddpnopt.ddp.recognise import recognise


def cosine(z: Tensor, y: Tensor) -> Tensor:
    return 1 - F.cosine_similarity(z, F.one_hot(y, z.shape[1]).to(z), dim=1).mean()


def smoothed(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, label_smoothing=0.1)


def kinds(losses: list[str], seed: int = 0) -> list[str]:
    """What the report says of each step, trained by these losses one after the other."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    opt, found = DDPNOpt(model), []
    for name in losses:
        x, y = torch.randn(24, 8), torch.randint(4, (24,))
        opt.zero_grad()
        {"cosine": cosine, "smoothed": smoothed}[name](model(x), y).backward()
        opt.step()
        found.append(opt.report.loss)
    return found


def test_rare_forms_are_tried_in_few_steps_where_none_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[bool] = []
    candidates = search_module._candidates

    def note(*args: object) -> object:
        tried.append(bool(args[-1]))
        return candidates(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(search_module, "_candidates", note)
    counts = []
    for seed in range(3):  # in one of a few runs a gradient looks like that of a squared error by chance
        tried.clear()
        kinds(["cosine"] * (2 * AGAIN), seed)
        assert all(tried[:TRIES])
        counts.append(sum(tried))
    assert sorted(counts)[1] <= TRIES + 2


def test_a_loss_that_changes_into_one_that_is_known_is_found() -> None:
    found = kinds(["cosine"] * (TRIES + 3) + ["smoothed"] * (AGAIN + 4))
    assert "cross_entropy" not in found[: TRIES + 3]
    assert found[-1] == found[-4] == "cross_entropy"


def test_a_squared_error_is_tried_first_after_a_squared_error_and_another_loss_is_still_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[str] = []
    candidates = search_module._candidates

    def note(*args: object) -> object:
        tried.append("others")
        return candidates(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(search_module, "_candidates", note)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    opt, found = DDPNOpt(model), []
    for step in range(8):
        x, y = torch.randn(24, 8), torch.randint(4, (24,))
        opt.zero_grad()
        z = model(x)
        (F.mse_loss(z, F.one_hot(y, 4).to(z)) if step < 5 else F.cross_entropy(z, y)).backward()
        opt.step()
        found.append(opt.report.loss)
    assert found == ["squared_error"] * 5 + ["cross_entropy"] * 3
    assert len(tried) == 4  # the first squared error, and the cross-entropies


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.body(x))
        return self.a(h), self.b(h)


def test_a_rare_form_at_one_output_is_found_in_every_step_beside_one_without_a_form() -> None:
    torch.manual_seed(0)
    model = TwoHeads()
    opt, found = DDPNOpt(model), []
    for _ in range(TRIES + AGAIN):
        x, y = torch.randn(24, 8), torch.randint(4, (24,))
        opt.zero_grad()
        one, other = model(x)
        (smoothed(one, y) + cosine(other, y)).backward()
        opt.step()
        found.append(opt.report.loss)
    assert {kinds.split(" + ")[0] for kinds in found} == {"cross_entropy"}
    assert {kinds.split(" + ")[1] for kinds in found} <= set(NO_FORM)
    assert found.count("cross_entropy + unknown") > len(found) / 2  # by chance a gradient looks like a squared error's


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_squared_errors_at_several_outputs_are_recognised_together(factor: float) -> None:
    torch.manual_seed(0)
    model = TwoHeads()
    opt, target = DDPNOpt(model), torch.randn(24, 4)
    losses = []
    x = torch.randn(24, 8)
    for _ in range(30):
        opt.zero_grad()
        one, other = model(x)
        loss = factor * (F.mse_loss(one, target) + F.mse_loss(other, 2 * target))
        loss.backward()
        opt.step()
        losses.append(loss.item())
        assert opt.report.loss == "squared_error"
    assert losses[-1] < 0.5 * losses[0]


def binary(z: Tensor, y: Tensor, scale: float) -> Tensor:
    return scale * F.binary_cross_entropy_with_logits(z, F.one_hot(y, z.shape[1]).to(z), reduction="sum")


def test_the_form_at_each_of_several_outputs_is_tried_first_at_any_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    hard = search_module.binary.hard_targets
    monkeypatch.setattr(search_module.binary, "hard_targets", lambda *args: tried.append(1) or hard(*args))
    torch.manual_seed(0)
    model = TwoHeads()
    opt = DDPNOpt(model)
    for step in range(12):
        x, y = torch.randn(24, 8), torch.randint(4, (24,))
        opt.zero_grad()
        one, other = model(x)
        scale = 0.03 * 1.1**step  # as it is annealed
        wanted = binary(one, y, scale)
        (wanted + cosine(other, y)).backward()
        kept = spy_on_losses(monkeypatch)
        opt.step()
        (z, loss), _ = kept[0]
        assert (loss.kind, loss.certain) == ("binary_cross_entropy", True)
        assert loss.total(z) == pytest.approx(wanted.item(), rel=1e-5)
    assert len(tried) <= 2 * TRIES + 2  # of the other output, and in the first step


def spy_on_losses(monkeypatch: pytest.MonkeyPatch) -> list[Losses]:
    """The losses that the next steps recognise."""
    kept: list[Losses] = []

    def keep(*args: object) -> Losses:
        kept.append(recognised_losses(*args))  # type: ignore[arg-type]
        return kept[-1]

    monkeypatch.setattr("ddpnopt._rescale.recognised_losses", keep)
    return kept


def test_losses_at_several_outputs_that_change_from_step_to_step_are_found_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def squared(z: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(z, F.one_hot(y, 4).to(z))

    forms: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "squared_error": squared,
        "cross_entropy": F.cross_entropy,
        "binary_cross_entropy": lambda z, y: binary(z, y, 0.1),
    }
    torch.manual_seed(0)
    model = TwoHeads()
    opt, kept = DDPNOpt(model), spy_on_losses(monkeypatch)
    names = list(forms)
    plan = [(names[0], names[0])] * 3 + [(a, b) for a in names for b in names] * 2 + [(names[2], names[2])] * 2
    for step, (a, b) in enumerate(plan):
        x, y = torch.randn(24, 8), torch.randint(4, (24,))
        opt.zero_grad()
        outputs = model(x)
        factor = 0.5 if step % 4 == 3 else 1.0
        wanted = [factor * forms[name](z, y) for name, z in zip((a, b), outputs, strict=True)]
        torch.stack(wanted).sum().backward()
        opt.step()
        assert [loss.kind for _, loss in kept[-1]] == [a, b]
        for (z, loss), value in zip(kept[-1], wanted, strict=True):
            assert loss.total(z) == pytest.approx(value.item(), rel=1e-3)


def test_squared_errors_at_several_outputs_are_tried_first_and_follow_their_scale(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[int] = []
    shared = losses_module._shared_out
    monkeypatch.setattr(losses_module, "_shared_out", lambda *args: tried.append(1) or shared(*args))
    torch.manual_seed(0)
    model, target = TwoHeads(), torch.randn(24, 4)
    opt, kept = DDPNOpt(model), spy_on_losses(monkeypatch)
    for step in range(9):
        opt.zero_grad()
        one, other = model(torch.randn(24, 8))
        wanted = [(0.5 if step > 5 else 1.0) * F.mse_loss(z, target) for z in (one, other)]
        torch.stack(wanted).sum().backward()
        opt.step()
        for (z, loss), value in zip(kept[-1], wanted, strict=True):
            assert (loss.kind, loss.total(z)) == ("squared_error", pytest.approx(value.item(), rel=1e-3))
    assert len(tried) == 2  # the first step, and that in which the scale changes


def test_outputs_that_are_the_losses_are_tried_first_and_another_loss_is_still_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[int] = []
    candidates = search_module._candidates
    monkeypatch.setattr(search_module, "_candidates", lambda *args: tried.append(1) or candidates(*args))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    opt, found = DDPNOpt(model), []
    for step in range(12):
        x, y = torch.randn(24, 8), torch.randint(2, (24, 1)).float()
        opt.zero_grad()
        z = model(x)
        (F.binary_cross_entropy_with_logits(z, y) if 5 <= step < 9 else (0.1 * step + 1) * z.mean()).backward()
        opt.step()
        found.append(opt.report.loss)
    assert found == ["sum of outputs"] * 5 + ["binary_cross_entropy"] * 4 + ["sum of outputs"] * 3
    assert len(tried) <= 6  # the first sum, those of the other loss, and the first sum after it


@pytest.mark.parametrize("first", range(3))
def test_one_place_with_the_usual_gradient_does_not_make_the_others_hard_labels(first: int) -> None:
    torch.manual_seed(0)
    z, y = torch.randn(24, 3, requires_grad=True), torch.arange(24) % 3
    y = torch.cat([y[y == first], y[y != first]])
    weight = torch.tensor([0.5, 1.0, 2.0])
    each = F.cross_entropy(z, y, weight / weight[first], reduction="none")
    q = torch.autograd.grad(each.mean(), z)[0]
    found = search_module.recognise(z.detach(), q, True, each.mean().item())
    assert (found.kind, found.certain) == ("cross_entropy", True)
    torch.testing.assert_close(found.per_sample(z.detach()), each.detach() / 24, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("shape", [(24, 5), (40, 16, 64), (40, 64, 4, 4)])
def test_labels_and_losses_are_the_same_for_few_and_for_many_numbers(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    z = torch.randn(shape, requires_grad=True)
    dim = 1 if len(shape) == 4 else len(shape) - 1
    y = torch.randint(shape[dim], [n for k, n in enumerate(shape) if k != dim])
    each = F.cross_entropy(z.movedim(dim, 1), y, reduction="none")
    q = torch.autograd.grad(each.mean(), z)[0]
    found = search_module.recognise(z.detach(), q, True, each.mean().item())
    assert isinstance(found, Loss)
    assert found.label is not None
    assert torch.equal(found.label, y)
    wanted = each.detach().flatten(1).sum(1) if each.dim() > 1 else each.detach()
    torch.testing.assert_close(found.per_sample(z.detach()), wanted / each.numel())
    torch.testing.assert_close(found.per_sample(z.detach().clone()), wanted / each.numel())


def test_a_scale_that_is_round_by_chance_is_not_believed_where_no_form_has_fitted() -> None:
    z, t = torch.randn(16, 3), torch.randn(16, 3)
    for factor, kind in ((1.0, "squared_error"), (0.3, "unknown")):
        scale = factor / z.numel()
        total = scale * float((z - t).square().sum())
        assert recognise(z, 2 * scale * (z - t), True, total).kind == "squared_error"
        assert recognise(z, 2 * scale * (z - t), True, total, rare=False).kind == kind
