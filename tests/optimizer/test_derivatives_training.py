"""Training with derivatives of the model in the loss, and derivatives that are no part of it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from derivative_networks import Losses, interior, joint, net, slope_of
from torch import Tensor, nn

from ddpnopt import DDPNOpt, StepError
from ddpnopt.errors import OpenLoopWarning


@pytest.mark.parametrize("anew", [False, True])
def test_a_differential_equation_is_solved_in_few_steps(anew: bool) -> None:
    """u'' = -u, u(0) = 0, u'(0) = 1, whose solution is the sine."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    opt = DDPNOpt(model)
    x = torch.linspace(0, 3, 60)[:, None]
    for _ in range(60):
        points = (3 * torch.rand(60, 1) if anew else x.clone()).requires_grad_()
        start = torch.zeros(1, 1, requires_grad=True)
        u, at_start = model(points), model(start)
        r = slope_of(slope_of(u, points), points) + u
        opt.zero_grad()
        (r.square().mean() + at_start.square().sum() + (slope_of(at_start, start) - 1).square().sum()).backward()
        opt.step()
    assert opt.report.open_loop == []
    assert float((model(x) - torch.sin(x)).detach().abs().max()) < 1e-3


@pytest.mark.parametrize("far", [30.0, float("inf")])
def test_most_of_a_step_is_taken_back_if_the_loss_after_it_is_larger_or_not_finite(far: float) -> None:
    torch.manual_seed(0)
    model = net()
    opt = DDPNOpt(model)
    x = torch.randn(20, 2)
    first = model[0].weight  # type: ignore[index]

    def step(factor: float = 1.0) -> None:
        opt.zero_grad()
        (factor * interior(model, x)).square().mean().backward()
        opt.step()

    for _ in range(3):
        step()
    before, count = first.detach().clone(), opt.report.shortened
    step()
    planned = first.detach() - before
    step(far)
    assert opt.report.shortened == count + 1
    torch.testing.assert_close(first.detach(), before + 0.25 * planned)


def with_slope(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    z = model(x)
    return z.mean() + (slope_of(z, x).norm(dim=1) - 1).square().mean()


def only_slope(model: nn.Module, x: Tensor) -> Tensor:
    """With ReLU no gradient comes back to the outputs of the differentiated pass at all."""
    x = x.clone().requires_grad_()
    return model(x.detach()).mean() + (slope_of(model(x), x).norm(dim=1) - 1).square().mean()


@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU])
@pytest.mark.parametrize("loss", [with_slope, only_slope])
def test_without_a_least_value_all_weights_have_the_gradient_of_autograd(
    loss: Losses, activation: type[nn.Module]
) -> None:
    model = net(activation)
    twin = copy.deepcopy(model)
    x = torch.randn(9, 2)
    opt = DDPNOpt(model)
    loss(model, x).backward()
    with pytest.warns(OpenLoopWarning, match="sum of squares"):
        opt.step()
    loss(twin, x).backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        torch.testing.assert_close(p.grad, q.grad)
        assert q.grad.abs().sum() == 0 or not torch.equal(p, q)


def wasserstein(judge: nn.Module, real: Tensor, fake: Tensor, mix: Tensor) -> Tensor:
    between = (mix * real + (1 - mix) * fake).requires_grad_()
    penalty = (slope_of(judge(between), between).norm(dim=1) - 1).square().mean()
    return judge(fake).mean() - judge(real).mean() + 10 * penalty


def smooth(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    z = model(x)
    return F.mse_loss(z, y) + 0.1 * slope_of(z, x).square().sum(1).mean()


def test_a_critic_with_a_gradient_penalty_trains() -> None:
    torch.manual_seed(0)
    judge = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1))
    opt = DDPNOpt(judge)
    real, fake, mix = torch.randn(32, 2) * 0.5 + 1.5, torch.randn(32, 2), torch.rand(32, 1)
    before = float(wasserstein(judge, real, fake, mix).detach())
    for _ in range(40):
        opt.zero_grad()
        wasserstein(judge, real, fake, mix).backward()
        opt.step()
    assert float(wasserstein(judge, real, fake, mix).detach()) < min(before, 0) - 0.3


def test_a_penalty_on_the_gradient_by_the_inputs_trains_with_all_layers_coupled() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1))
    opt = DDPNOpt(model)
    x = torch.randn(64, 2)
    y = x.prod(1, keepdim=True)
    before = float(smooth(model, x, y).detach())
    for _ in range(40):
        opt.zero_grad()
        smooth(model, x, y).backward()
        opt.step()
    assert opt.report.open_loop == []
    assert float(smooth(model, x, y).detach()) < 0.5 * before


def test_a_penalty_computed_before_zero_grad_counts() -> None:
    model = net()
    opt = DDPNOpt(model)
    loss = with_slope(model, torch.randn(9, 2))
    opt.zero_grad()
    loss.backward()
    opt.step()
    assert opt.report.open_loop == [name for name, _ in model.named_parameters()]
    F.mse_loss(model(torch.randn(9, 2)), torch.randn(9, 1)).backward()
    opt.step()
    assert opt.report.open_loop == []  # the next step is an ordinary one


def test_backward_is_torchs_own_before_and_after_a_step() -> None:
    own = torch.autograd.backward
    model = net()
    opt = DDPNOpt(model)
    interior(model, torch.randn(9, 2)).square().mean().backward()
    opt.step()
    assert torch.autograd.backward is own
    interior(model, torch.randn(9, 2))  # which never becomes part of a loss
    del opt
    torch.ones((), requires_grad=True).backward()
    assert torch.autograd.backward is own


def test_a_loss_of_something_else_is_left_alone_while_one_with_derivatives_is_awaited() -> None:
    model = net()
    opt = DDPNOpt(model)
    x = torch.randn(6, 2, requires_grad=True)
    slope = slope_of(model(x), x)
    other = nn.Parameter(torch.randn(12))
    (torch.randn(5, 3, 4) + other.view(1, 3, 4)).sum().backward()  # a sum that is broadcast, then another shape
    torch.testing.assert_close(other.grad, torch.full((12,), 5.0))
    slope.square().mean().backward()
    opt.step()


def test_a_derivative_by_the_weights_is_that_of_autograd() -> None:
    model = net().double()
    twin = copy.deepcopy(model)
    opt = DDPNOpt(model)
    x = torch.randn(9, 2).double()
    found = []
    for each in (model, twin):
        points = x.clone().requires_grad_()
        grads = torch.autograd.grad(each(points).square().mean(), list(each.parameters()), create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in grads), points)[0])
    torch.testing.assert_close(*found)
    assert opt.steps == 0


def test_the_derivative_of_an_attack_does_not_belong_to_the_step() -> None:
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))
    twin = copy.deepcopy(model)
    a, b = DDPNOpt(model), DDPNOpt(twin)
    x, y = torch.randn(9, 2), torch.randint(3, (9,))
    x.requires_grad_()
    (slope,) = torch.autograd.grad(F.cross_entropy(model(x), y), x)
    attacked = (x + 0.1 * slope.sign()).detach()
    for net_, opt in ((model, a), (twin, b)):
        F.cross_entropy(net_(attacked), y).backward()
        opt.step()
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


class Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift, self.out = nn.Parameter(torch.randn(2)), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(x + self.shift))  # type: ignore[no-any-return]


def test_a_derivative_by_the_inputs_after_the_backward_pass_leaves_the_gradient_of_bare_parameters() -> None:
    model = Shift()
    twin = copy.deepcopy(model)
    a, b = DDPNOpt(model), DDPNOpt(twin)
    x, y = torch.randn(9, 2, requires_grad=True), torch.randint(3, (9,))
    for net_, opt in ((model, a), (twin, b)):
        loss = F.cross_entropy(net_(x), y)
        loss.backward(retain_graph=True)
        if opt is a:
            torch.autograd.grad(-5 * loss, x)
        opt.step()
    assert a.report.open_loop == []
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


def test_a_derivative_by_an_input_that_was_computed_counts() -> None:
    model, before = net().double(), nn.Linear(2, 2).double()
    twin = copy.deepcopy(model)
    opt = DDPNOpt(model)
    x = torch.randn(9, 2).double()
    for each in (model, twin):
        y = before(x)
        slope_of(each(y), y).square().mean().backward()
    found, _ = joint(opt)
    for name, m in twin.named_modules():
        if isinstance(m, nn.Linear):
            assert m.weight.grad is not None
            torch.testing.assert_close(found[name].sum(0)[: m.weight.numel()], m.weight.grad.flatten())


def test_a_derivative_by_something_else_names_the_way_out_which_works() -> None:
    model = net()
    x, scale = torch.randn(9, 2), torch.ones(1, 2, requires_grad=True)
    for options in ({}, {"weight_grads": True}):
        opt = DDPNOpt(model, **options)  # type: ignore[arg-type]
        model.register_forward_pre_hook(lambda _, args: (args[0] * scale,))  # behind the hook that records the inputs
        (slope,) = torch.autograd.grad(model(x).sum(), scale, create_graph=True)
        slope.square().mean().backward()
        if options:
            opt.step()
        else:
            with pytest.raises(StepError, match="weight_grads=True"):
                opt.step()
        del opt


class Field(nn.Module):
    """The slope of a scalar, with a variable of its own or by the input."""

    def __init__(self, inside: bool, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.inside = inside
        self.energy = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_() if self.inside else x
        return slope_of(self.energy(2 * x), x)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_derivative_computed_in_the_forward_pass_is_one_by_the_input(dropout: float) -> None:
    torch.manual_seed(0)
    model = Field(True, dropout=dropout)
    other = Field(False, dropout=dropout)
    other.load_state_dict(model.state_dict())
    x = torch.randn(20, 2)
    losses = []
    for each in (model, other):
        opt = DDPNOpt(each)
        torch.manual_seed(1)
        for _ in range(5):
            opt.zero_grad()
            loss = F.mse_loss(each(x.clone().requires_grad_(not each.inside)), -x)
            loss.backward()
            opt.step()
            losses.append(float(loss.detach()))
        assert opt.report.open_loop == []
        assert opt.report.loss == "residuals"
    torch.testing.assert_close(losses[:5], losses[5:], rtol=1e-5, atol=1e-8)


def test_a_field_that_is_the_slope_of_the_model_is_learnt_in_few_steps() -> None:
    torch.manual_seed(0)
    model = Field(True)
    opt = DDPNOpt(model)
    x = torch.randn(64, 2)
    for _ in range(60):
        opt.zero_grad()
        F.mse_loss(model(x), torch.sin(x)).backward()
        opt.step()
    assert float(F.mse_loss(model(x), torch.sin(x)).detach()) < 1e-3
