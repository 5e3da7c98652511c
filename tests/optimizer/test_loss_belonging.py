"""Whether passes of one backward pass belong together is not found out in every step, and a change is noticed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt import DDPNOpt, _collect
from ddpnopt.ddp.loss import AnyLoss, Loss, UnknownLoss
from ddpnopt.ddp.loss_search import AGAIN, TRIES, Belonging


def joint(model: nn.Module) -> Tensor:
    """A loss of pairs."""
    a, b = (model(torch.randn(12, 6)) for _ in range(2))
    return (1 - F.cosine_similarity(a, b)).square().mean() + 0.1 * (a - b).abs().mean()


def own(model: nn.Module) -> Tensor:
    """Each pass has a loss of its own."""
    return torch.stack([F.cross_entropy(model(torch.randn(12, 6)), torch.randint(4, (12,))) for _ in range(2)]).sum()


def answers(monkeypatch: pytest.MonkeyPatch, plan: str) -> tuple[list[bool], list[int]]:
    """Whether the passes were taken as one in each step of a plan ("j" or "o"), and the steps that looked at losses."""
    together: list[bool] = []
    looks: list[int] = []
    as_one, look = _collect._belong_together, _collect._have_own_losses

    def note(*args: object) -> bool:
        together.append(as_one(*args))  # type: ignore[arg-type]
        return together[-1]

    def count(*args: object) -> bool:
        looks.append(len(together))
        return look(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(_collect, "_belong_together", note)
    monkeypatch.setattr(_collect, "_have_own_losses", count)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    opt = DDPNOpt(model)
    for step in plan:
        opt.zero_grad()
        (joint if step == "j" else own)(model).backward()
        opt.step()
    return together, looks


@pytest.mark.parametrize("kind", "jo")
def test_the_losses_of_passes_are_looked_at_now_and_then(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    together, looks = answers(monkeypatch, kind * 40)
    assert together == [kind == "j"] * 40
    assert looks == [*range(TRIES), AGAIN, 2 * AGAIN]


@pytest.mark.parametrize("first", "jo")
def test_passes_that_come_to_belong_together_or_apart_are_noticed_in_the_next_step(
    monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    then = "o" if first == "j" else "j"
    together, _ = answers(monkeypatch, first * 9 + then * 6)
    assert together == [first == "j"] * 10 + [then == "j"] * 5  # the first step of the change is taken as those before


def test_answers_for_one_path_say_nothing_of_another() -> None:
    belonging = Belonging()
    for _ in range(TRIES):
        assert belonging.known("a") is None
        belonging.note("a", together=True)
    assert (belonging.known("a"), belonging.known("b")) == (True, None)


def test_another_answer_is_not_trusted_before_it_was_given_as_often() -> None:
    belonging = Belonging()
    for _ in range(TRIES):
        belonging.note("a", together=True)
    for _ in range(TRIES):
        belonging.note("a", together=False)
        assert belonging.known("a") is (False if belonging.answers["a"][1] >= TRIES else None)


@pytest.mark.parametrize("together", [True, False])
def test_only_losses_that_speak_against_an_answer_make_it_forgotten(together: bool) -> None:
    z = torch.randn(4, 3)
    of_its_own = Loss("cross_entropy", z.softmax(1), 1.0)
    none = UnknownLoss(z, z, torch.ones(4))
    both: dict[bool, list[AnyLoss]] = {True: [none, none], False: [of_its_own, of_its_own]}
    belonging = Belonging()
    for fits in (True, False):
        belonging.note("a", together)
        belonging.check(both[together is fits])
        assert bool(belonging.answers) is fits
