"""Training loops that put weights back after each step: clamped, masked or copied ones."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt import DDPNOpt
from ddpnopt.errors import TrainingWarning

Change = Callable[[nn.Module], None]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Softplus(), nn.Linear(16, 1))


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x = torch.rand(64, 6)
    return x, x[:, :3].square().sum(1, keepdim=True)


@torch.no_grad()
def clamp(model: nn.Module) -> None:
    for name, p in model.named_parameters():
        if "weight" in name:
            p.data.clamp_(min=0)  # without a change of the version counter


@torch.no_grad()
def mask(model: nn.Module) -> None:
    for name, p in model.named_parameters():
        if "weight" in name:
            p.mul_((torch.arange(p.numel()) % 3 == 0).view_as(p))


def train(model: nn.Module, opt: torch.optim.Optimizer, change: Change, steps: int) -> float:
    x, t = data()
    change(model)
    for k in range(steps):
        batch = slice(16 * (k % 4), 16 * (k % 4) + 16)
        opt.zero_grad()
        F.mse_loss(model(x[batch]), t[batch]).backward()
        opt.step()
        change(model)
    return float(F.mse_loss(model(x), t).detach())


@pytest.mark.parametrize("change", [clamp, mask])
def test_it_trains_as_far_as_adam_and_says_once_what_it_does(change: Change) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = network()
        ours = train(model, DDPNOpt(model), change, 60)
    told = [str(w.message) for w in caught if w.category is TrainingWarning]
    assert len(told) == 1
    assert "0, 2" in told[0] or "2, 0" in told[0]
    model = network()
    assert ours < train(model, torch.optim.Adam(model.parameters(), 1e-2), change, 60)


@pytest.mark.filterwarnings("ignore::ddpnopt.TrainingWarning")
def test_weights_that_are_masked_after_each_step_are_left_out_of_it() -> None:
    model, (x, t) = network(), data()
    opt = DDPNOpt(model)
    train(model, opt, mask, 20)
    zero = model[0].weight.detach() == 0
    before = model[0].weight.detach().clone()
    live = model[2].weight.detach()[0] != 0  # units that the output depends on
    opt.zero_grad()
    F.mse_loss(model(x), t).backward()
    opt.step()
    moved = model[0].weight.detach() != before
    assert int(moved[zero].sum()) <= 0.05 * int(zero.sum())  # the gradient has turned, for the first time
    assert bool(moved[live][~zero[live]].all())
    assert opt.report.open_loop == []


@pytest.mark.filterwarnings("ignore::ddpnopt.TrainingWarning")
def test_a_clamped_weight_leaves_the_bound_when_the_gradient_turns() -> None:
    model, (x, t) = network(), data()
    opt = DDPNOpt(model)
    train(model, opt, clamp, 20)
    at_zero = model[2].weight.detach() == 0
    opt.zero_grad()
    F.mse_loss(model(x), t + 5).backward()  # more of every unit
    opt.step()
    assert bool(at_zero.any())
    assert bool((model[2].weight.detach()[at_zero] > 0).all())


@torch.no_grad()
def decay(model: nn.Module) -> None:
    for p in model.parameters():
        p.mul_(0.98)


@torch.no_grad()
def disturb(model: nn.Module) -> None:
    for p in model.parameters():
        p.add_(1e-3 * torch.randn_like(p))


def go_back_at_times() -> Change:
    """To the weights before the last step, as where a loss on other data has risen."""
    kept: list[dict[str, Tensor]] = []

    def change(model: nn.Module) -> None:
        if len(kept) % 3 == 2:
            model.load_state_dict(kept[-1])
        kept.append(copy.deepcopy(model.state_dict()))

    return change


@pytest.mark.parametrize("change", [lambda model: None, decay, disturb, go_back_at_times()])
def test_other_changes_of_weights_are_left_alone(change: Change) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = network()
        opt = DDPNOpt(model)
        train(model, opt, change, 40)
    assert not [w for w in caught if w.category is TrainingWarning]
    assert not opt._held.tracked


@pytest.mark.filterwarnings("ignore::ddpnopt.TrainingWarning")
def test_training_goes_on_from_a_saved_state() -> None:
    model = network()
    opt = DDPNOpt(model)
    before = train(model, opt, clamp, 20)
    other = network()
    other.load_state_dict(model.state_dict())
    again = DDPNOpt(other)
    again.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert train(other, again, clamp, 30) < before


def test_parts_of_a_recurrent_layer_are_not_taken_apart() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.out = nn.GRU(6, 8, batch_first=True), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.out(self.rnn(x[:, None].expand(-1, 3, -1))[0][:, -1])
            return out

    torch.manual_seed(0)
    model = Tagger()
    with pytest.warns(TrainingWarning, match="puts weights of"):
        losses = [train(model, opt, mask, 1) for opt in [DDPNOpt(model)] for _ in range(40)]
    assert losses[-1] < 0.5 * losses[0]
