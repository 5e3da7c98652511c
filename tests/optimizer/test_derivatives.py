"""Losses with derivatives of the model in them: never a wrong gradient, and the samples are coupled."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt import DDPNOpt, StepError
from ddpnopt.errors import OpenLoopWarning
from ddpnopt.linear.metric import IDENTITY
from ddpnopt.linear.uses import LinearUses
from ddpnopt.trace.derivatives import joint_batch

Losses = Callable[[nn.Module, Tensor], Tensor]


def net(activation: type[nn.Module] = nn.Tanh) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 8), activation(), nn.Linear(8, 1))


def deep() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 7), nn.Tanh(), nn.Linear(7, 6, bias=False), nn.Softplus(), nn.Linear(6, 1))


def slope_of(z: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(z.sum(), x, create_graph=True)[0]


# -- residuals of each sample, whose mean square is the loss -----------------------------------------------------------


def first_derivative(model: nn.Module, x: Tensor) -> Tensor:
    return slope_of(model(x), x).norm(dim=1) - 1


def laplacian(model: nn.Module, x: Tensor) -> Tensor:
    slope = slope_of(model(x), x)
    return slope_of(slope[:, 0], x)[:, 0] + slope_of(slope[:, 1], x)[:, 1] + x.detach().prod(1)


def burgers(model: nn.Module, x: Tensor) -> Tensor:
    u = model(x)
    slope = slope_of(u, x)
    return slope[:, :1] + u * slope[:, 1:] - 0.1 * slope_of(slope[:, 1], x)[:, 1:]


def third_derivative(model: nn.Module, x: Tensor) -> Tensor:
    u = model(x)
    for _ in range(3):
        u = slope_of(u, x)[:, :1]
    return u


def joint(opt: DDPNOpt) -> tuple[dict[str, Tensor], Tensor]:
    """The gradients of each sample, by the name of the layer, (B, parameters), and the losses."""
    batch = joint_batch(opt._capture.arrivals)
    recording, losses = batch.recording, batch.losses
    found = {}
    for record in recording.layers:
        assert isinstance(record.layer, LinearUses)
        assert record.p_h is not None
        gradients = record.layer.sample_gradients(record.x, record.p_h)
        rows = [
            torch.cat([part.flatten() for part in gradients.combine(row)]) for row in torch.eye(len(losses)).double()
        ]
        found[record.name] = torch.stack(rows)
        torch.testing.assert_close(gradients.gram(IDENTITY), found[record.name] @ found[record.name].T)
    return found, losses


def dense(model: nn.Module, losses: Tensor) -> dict[str, Tensor]:
    """The same by one backward pass per sample."""
    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    rows: dict[str, list[Tensor]] = {name: [] for name in layers}
    for loss in losses:
        for name, m in layers.items():
            grads = torch.autograd.grad(loss, list(m.parameters()), retain_graph=True, materialize_grads=True)
            rows[name].append(torch.cat([g.flatten() for g in grads]))
    return {name: torch.stack(each) for name, each in rows.items()}


@pytest.mark.parametrize("residual", [first_derivative, laplacian, burgers, third_derivative])
def test_the_gradients_of_the_samples_are_those_of_autograd(residual: Losses) -> None:
    torch.manual_seed(0)
    model = deep().double()
    twin = copy.deepcopy(model)
    opt = DDPNOpt(model)
    x, edge = torch.randn(9, 2).double(), torch.randn(4, 2).double()
    points = x.clone().requires_grad_()
    loss = residual(model, points).square().mean() + 10 * (model(edge) - 1).square().mean()
    loss.backward()
    found, losses = joint(opt)
    points = x.clone().requires_grad_()
    exact = torch.cat(
        [residual(twin, points).square().flatten() / 9, 10 * (twin(edge) - 1).square().flatten() / 4],
    )
    torch.testing.assert_close(losses, exact.detach(), rtol=1e-12, atol=0)
    for name, rows in dense(twin, exact).items():
        torch.testing.assert_close(found[name], rows, rtol=1e-9, atol=1e-12)


def test_one_step_is_that_of_dense_matrices() -> None:
    torch.manual_seed(0)
    model = deep().double()
    twin = copy.deepcopy(model)
    opt = DDPNOpt(model)
    x = torch.randn(12, 2).double()
    laplacian(model, x.clone().requires_grad_()).square().mean().backward()
    damping = opt._trust.damping
    opt.step()
    losses = laplacian(twin, x.clone().requires_grad_()).square() / 12
    G = dense(twin, losses)
    r = (2 * losses.detach()).sqrt()
    J = {name: rows / r[:, None] for name, rows in G.items()}
    layers = dict(twin.named_modules())
    eta = {}
    for name, rows in J.items():
        size = layers[name].weight.detach().square().mean().sqrt()
        eta[name] = size * (rows.shape[1] / rows.square().sum(1).mean()).sqrt()
    A = torch.stack([eta[name] * rows @ rows.T for name, rows in J.items()]).sum(0)
    y = torch.linalg.solve(A + damping * A.diagonal().mean() * torch.eye(12).double(), r)
    after = dict(model.named_modules())
    for name, rows in J.items():
        old, new = (torch.cat([p.detach().flatten() for p in net_[name].parameters()]) for net_ in (layers, after))
        torch.testing.assert_close(new - old, -eta[name] * rows.T @ y, rtol=1e-9, atol=1e-12)


# -- which losses, and which passes ------------------------------------------------------------------------------------


def interior(model: nn.Module, x: Tensor) -> Tensor:
    return laplacian(model, x.clone().requires_grad_())


def weighted(model: nn.Module, x: Tensor) -> Tensor:
    weight = torch.linspace(1, 2, len(x)).double()
    return torch.mean(weight * interior(model, x) ** 2) + 3 * F.mse_loss(model(x), torch.ones(len(x), 1).double())


def periodic(model: nn.Module, x: Tensor) -> Tensor:
    return interior(model, x).square().mean() + (model(x[:4]) - model(x[:4] + 1)).square().sum()


def sliced(model: nn.Module, x: Tensor) -> Tensor:
    points = x.clone().requires_grad_()
    u = model(points)
    slope = slope_of(u, points)
    return (slope[:-3].sum(1) ** 2).mean() + u[-3:].square().mean() / 2


def two_inputs(model: nn.Module, x: Tensor) -> Tensor:
    t, y = (part.clone().requires_grad_() for part in x.split(1, 1))
    u = model(torch.cat([t, y], 1))
    return (slope_of(u, t) - slope_of(slope_of(u, y), y)).square().mean() + (u * u).mean()


def robust(model: nn.Module, x: Tensor) -> Tensor:
    r = interior(model, x)
    return r.abs().mean() + F.huber_loss(r, torch.zeros_like(r)) + torch.stack([r.square().mean()]).sum()


def per_sample(model: nn.Module, x: Tensor, loss: Losses) -> tuple[list[float], int]:
    """The losses of the samples in a test, and how many layers take part."""
    opt = DDPNOpt(model)
    loss(model, x).backward()
    batch = joint_batch(opt._capture.arrivals)
    opt._capture.arrivals.clear()
    return batch.losses.tolist(), len(batch.recording.layers)


@pytest.mark.parametrize(
    ("loss", "samples"), [(weighted, 18), (periodic, 13), (sliced, 9), (two_inputs, 18), (robust, 27)]
)
def test_interior_and_boundary_become_one_batch_whose_losses_add_up(loss: Losses, samples: int) -> None:
    torch.manual_seed(0)
    model = deep().double()
    x = torch.randn(9, 2).double()
    found, layers = per_sample(model, x, loss)
    assert len(found) == samples
    assert layers == 3
    assert sum(found) == pytest.approx(float(loss(model, x).detach()), rel=1e-12)


@pytest.mark.parametrize("loss", [weighted, periodic, sliced, two_inputs, robust])
def test_the_gradients_of_all_samples_add_up_to_that_of_autograd(loss: Losses) -> None:
    torch.manual_seed(0)
    model = deep().double()
    twin = copy.deepcopy(model)
    opt = DDPNOpt(model)
    x = torch.randn(9, 2).double()
    loss(model, x).backward()
    found, _ = joint(opt)
    loss(twin, x).backward()
    for name, m in twin.named_modules():
        if isinstance(m, nn.Linear):
            whole = torch.cat(
                [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in m.parameters()]
            )
            torch.testing.assert_close(found[name].sum(0), whole, rtol=1e-9, atol=1e-12)


def test_two_backward_passes_are_one_batch() -> None:
    torch.manual_seed(0)
    model = deep().double()
    x = torch.randn(10, 2).double()

    def both(model: nn.Module, x: Tensor) -> Tensor:
        (interior(model, x[:5]).square().mean() / 2).backward()
        return interior(model, x[5:]).square().mean() / 2

    found, _ = per_sample(model, x, both)
    whole, _ = per_sample(model, x, lambda model, x: interior(model, x).square().mean())
    assert found == pytest.approx(whole, rel=1e-12)


class Normed(nn.Module):
    """A layer kind without noted uses, and a coefficient that only the loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(2, 8), nn.LayerNorm(8), nn.Linear(8, 1)
        self.coefficient = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.norm(self.a(x))))  # type: ignore[no-any-return]


def test_layers_of_other_kinds_are_left_to_the_base_optimizer_by_name() -> None:
    torch.manual_seed(0)
    model = Normed()
    twin = copy.deepcopy(model)
    opt = DDPNOpt(model)
    x = torch.randn(9, 2)
    for each in (model, twin):
        points = x.clone().requires_grad_()
        (each.coefficient * slope_of(each(points), points).sum(1) - 1).square().mean().backward()
    with pytest.warns(OpenLoopWarning, match=r"norm\.weight, norm\.bias") as caught:
        opt.step()
    assert len(caught) == 1
    assert sorted(opt.report.open_loop) == ["coefficient", "norm.bias", "norm.weight"]
    for name in opt.report.open_loop:
        torch.testing.assert_close(model.get_parameter(name).grad, twin.get_parameter(name).grad)
    assert all(
        not torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True) if p.dim() == 2
    )


# -- training ----------------------------------------------------------------------------------------------------------


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
