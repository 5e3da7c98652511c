"""Losses with derivatives of the model in them: never a wrong gradient."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt import DDPNOpt, StepError


def net(activation: type[nn.Module] = nn.Tanh) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 8), activation(), nn.Linear(8, 1))


def with_slope(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    z = model(x)
    (slope,) = torch.autograd.grad(z.sum(), x, create_graph=True)
    return z.square().mean() + (slope.norm(dim=1) - 1).square().mean()


def only_slope(model: nn.Module, x: Tensor) -> Tensor:
    """With ReLU no gradient comes back to the outputs of the differentiated pass at all."""
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return model(x.detach()).mean() + (slope.norm(dim=1) - 1).square().mean()


@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU])
@pytest.mark.parametrize("loss", [with_slope, only_slope])
def test_all_weights_have_the_gradient_of_autograd(loss: object, activation: type[nn.Module]) -> None:
    model = net(activation)
    twin = copy.deepcopy(model)
    x = torch.randn(9, 2)
    opt = DDPNOpt(model)
    loss(model, x).backward()  # type: ignore[operator]
    opt.step()
    loss(twin, x).backward()  # type: ignore[operator]
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        torch.testing.assert_close(p.grad, q.grad)
        assert q.grad.abs().sum() == 0 or not torch.equal(p, q)


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
    model, before = net(), nn.Linear(2, 2)
    twin = copy.deepcopy(model)
    opt = DDPNOpt(model)
    x = torch.randn(9, 2)
    for each in (model, twin):
        y = before(x)
        (slope,) = torch.autograd.grad(each(y).sum(), y, create_graph=True)
        slope.square().mean().backward()
    opt.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


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
