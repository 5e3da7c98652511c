"""Small linear layers as one: the same step as layer by layer, in fewer calls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from step_runs import classes, relu_network, weights
from torch import Tensor, nn

from ddpnopt import DDPNOpt
from ddpnopt.ddp import stacked
from ddpnopt.ddp.stacked import Stacked

Loop = Callable[[nn.Module, DDPNOpt, int], None]


def step(model: nn.Module, opt: DDPNOpt, t: int, samples: int = 7) -> None:
    x, y = classes(t, steps=1, samples=samples)[0]
    opt.zero_grad()
    F.cross_entropy(model(x), y).backward()
    opt.step()


def sizes_change(model: nn.Module, opt: DDPNOpt, t: int) -> None:
    step(model, opt, t, samples=7 if t % 3 else 4)


def factor_changes(model: nn.Module, opt: DDPNOpt, t: int) -> None:
    opt.param_groups[0]["lr"] = 1 / (1 + t)
    step(model, opt, t)


def state_is_loaded(model: nn.Module, opt: DDPNOpt, t: int) -> None:
    opt.load_state_dict(opt.state_dict())
    step(model, opt, t)


def bias_is_frozen(model: nn.Module, opt: DDPNOpt, t: int) -> None:
    assert isinstance(model, nn.Sequential)
    assert isinstance(model[0], nn.Linear)
    model[0].bias.requires_grad_(t % 8 < 4)
    step(model, opt, t)


def weights_are_put_back(model: nn.Module, opt: DDPNOpt, t: int) -> None:
    step(model, opt, t)
    if t % 5 == 0:
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.5, 0.5)


def update_is_masked(model: nn.Module, opt: DDPNOpt, t: int) -> None:
    """As where weights were put back: a part of the last update of one layer is another tensor from then on."""
    step(model, opt, t)
    assert isinstance(model, nn.Sequential)
    assert isinstance(model[0], nn.Linear)
    if t % 3:
        update = opt.state[model[0].weight]["update"]
        update[0] = update[0] * (update[0] > 0)


@pytest.fixture
def stacks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many layers were stacked, of each step in which some were."""
    found: list[int] = []
    couple = Stacked.couple

    def counted(self: Stacked) -> tuple[Tensor, Tensor | None]:
        found.append(self.T)
        return couple(self)

    monkeypatch.setattr(Stacked, "couple", counted)
    return found


def trained(model: nn.Module, loop: Loop, steps: int, *, closed_loop: bool | None) -> Tensor:
    opt = DDPNOpt(model, closed_loop=closed_loop)
    for t in range(steps):
        loop(model, opt, t)
    return weights(model)


@pytest.mark.filterwarnings("ignore::ddpnopt.TrainingWarning", "ignore::ddpnopt.OpenLoopWarning")
@pytest.mark.parametrize("bias", [(True, True, True), (False, True, False), (False, False, False)])
@pytest.mark.parametrize("closed_loop", [None, False])
@pytest.mark.parametrize(
    "loop",
    [step, sizes_change, factor_changes, state_is_loaded, bias_is_frozen, weights_are_put_back, update_is_masked],
)
def test_a_stacked_step_is_that_of_its_layers(
    loop: Loop, closed_loop: bool | None, bias: tuple[bool, bool, bool], stacks: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if loop is bias_is_frozen and not bias[0]:
        pytest.skip("nothing to freeze")
    together = trained(relu_network(bias=bias), loop, 24, closed_loop=closed_loop)
    assert set(stacks) == {3}
    stacks.clear()
    monkeypatch.setattr(stacked, "can_be_stacked", lambda stages: False)
    one_by_one = trained(relu_network(bias=bias), loop, 24, closed_loop=closed_loop)
    assert stacks == []
    torch.testing.assert_close(together, one_by_one, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(4, 200), nn.ReLU(), nn.Linear(200, 3)),  # too wide for whole matrices
        nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)),
        nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Linear(2, 3), nn.Flatten(), nn.Linear(6, 3)),
        nn.Linear(4, 3),
    ],
    ids=["wide", "norm", "tokens", "single"],
)
def test_other_layers_are_visited_one_by_one(model: nn.Module, stacks: list[int]) -> None:
    trained(model.double(), step, 6, closed_loop=False)
    assert stacks == []


def test_layers_of_different_sizes_are_stacked_for_few_samples_only(stacks: list[int]) -> None:
    model = nn.Sequential(nn.Linear(4, 120), nn.ReLU(), nn.Linear(120, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    opt = DDPNOpt(model, closed_loop=False)
    for t in range(6):
        step(model, opt, t, samples=64 if t % 2 else 2)
    assert stacks == [3, 3, 3]


def test_layers_with_weight_decay_are_visited_one_by_one(stacks: list[int]) -> None:
    model = relu_network()
    opt = DDPNOpt(model, closed_loop=False, weight_decay=0.01)
    for t in range(6):
        step(model, opt, t)
    assert stacks == []


def test_a_stacked_step_that_fails_leaves_everything_as_it_was(
    stacks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = relu_network(), relu_network()
    opt, reference = DDPNOpt(model, closed_loop=False), DDPNOpt(other, closed_loop=False)
    change = Stacked.change

    def interrupted(self: Stacked, *args: object) -> None:
        change(self, *args)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    for t in range(8):
        step(other, reference, t)
        monkeypatch.setattr(Stacked, "change", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step(model, opt, t + 100)
        monkeypatch.setattr(Stacked, "change", change)
        step(model, opt, t)
        torch.testing.assert_close(weights(model), weights(other), rtol=1e-9, atol=1e-11)
    assert stacks
