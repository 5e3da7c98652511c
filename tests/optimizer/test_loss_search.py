"""Rare forms of losses are not tried at every step where none of them fits, and found again when one does."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt import DDPNOpt
from ddpnopt.ddp import recognise as search_module
from ddpnopt.ddp.recognise import AGAIN, NO_FORM, TRIES


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
