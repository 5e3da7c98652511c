"""Losses with derivatives of the model in them: never a wrong gradient, and the samples are coupled."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from derivative_networks import Losses, deep, interior, joint, laplacian, slope_of
from torch import Tensor, nn

from ddpnopt import DDPNOpt
from ddpnopt.errors import OpenLoopWarning
from ddpnopt.trace.derivatives import joint_batch

# -- residuals of each sample, whose mean square is the loss -----------------------------------------------------------


def first_derivative(model: nn.Module, x: Tensor) -> Tensor:
    return slope_of(model(x), x).norm(dim=1) - 1


def burgers(model: nn.Module, x: Tensor) -> Tensor:
    u = model(x)
    slope = slope_of(u, x)
    return slope[:, :1] + u * slope[:, 1:] - 0.1 * slope_of(slope[:, 1], x)[:, 1:]


def whole_slices(model: nn.Module, x: Tensor) -> Tensor:
    u = model(x)
    return u * slope_of(u, x)[0 : len(x)][:, :1]


def third_derivative(model: nn.Module, x: Tensor) -> Tensor:
    u = model(x)
    for _ in range(3):
        u = slope_of(u, x)[:, :1]
    return u


def dense(model: nn.Module, losses: Tensor) -> dict[str, Tensor]:
    """The same by one backward pass per sample."""
    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    rows: dict[str, list[Tensor]] = {name: [] for name in layers}
    for loss in losses:
        for name, m in layers.items():
            grads = torch.autograd.grad(loss, list(m.parameters()), retain_graph=True, materialize_grads=True)
            rows[name].append(torch.cat([g.flatten() for g in grads]))
    return {name: torch.stack(each) for name, each in rows.items()}


@pytest.mark.parametrize("residual", [first_derivative, laplacian, burgers, whole_slices, third_derivative])
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
