"""Gradients that do not come from one backward pass through one call of the model."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt import DDPNOpt
from ddpnopt.errors import OpenLoopWarning, StepError, TrainingWarning
from ddpnopt.trace.rescaling import own_gradient


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(16, 5), torch.randint(3, (16,))


def close(a: nn.Module, b: nn.Module) -> None:
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q)


# -- several backward passes through one forward pass ------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"lr": 0.1, "value": "outer"}, {"weight_grads": True}])
def test_two_backward_passes_through_one_forward_pass_are_one_of_the_sum(options: dict[str, object]) -> None:
    model = network()
    twin = copy.deepcopy(model)
    x, y = batch()
    one, two = (DDPNOpt(each, **options) for each in (model, twin))  # type: ignore[arg-type]
    for _ in range(3):
        for each in (one, two):
            each.zero_grad()
        z = model(x)
        F.cross_entropy(z, y).backward(retain_graph=True)
        (0.1 * z.square().mean()).backward()
        z = twin(x)
        (F.cross_entropy(z, y) + 0.1 * z.square().mean()).backward()
        one.step()
        two.step()
    close(model, twin)


def test_zero_grad_between_two_backward_passes_drops_the_first() -> None:
    model = network()
    twin = copy.deepcopy(model)
    x, y = batch()
    one, two = DDPNOpt(model), DDPNOpt(twin)
    z = model(x)
    z.square().mean().backward(retain_graph=True)
    one.zero_grad()
    F.cross_entropy(z, y).backward()
    F.cross_entropy(twin(x), y).backward()
    one.step()
    two.step()
    close(model, twin)


# -- autograd.grad by the weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_derivative_by_a_weight_that_becomes_part_of_the_loss_names_the_way_out_which_works(
    create_graph: bool,
) -> None:
    x, y = batch()
    model = network()
    opt = DDPNOpt(model)
    if create_graph:
        with pytest.raises(StepError, match="weight_grads=True"):
            torch.autograd.grad(F.cross_entropy(model(x), y), model[2].weight, create_graph=True)
    model = network()
    opt = DDPNOpt(model, weight_grads=True)
    losses = []
    for _ in range(10):
        loss = F.cross_entropy(model(x), y)
        (g,) = torch.autograd.grad(loss, model[2].weight, create_graph=create_graph, retain_graph=True)
        opt.zero_grad()
        (loss + (0.01 * g.square().sum() if create_graph else 0.0)).backward()
        opt.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_a_norm_of_gradients_by_the_weights_changes_nothing() -> None:
    model = network()
    twin = copy.deepcopy(model)
    x, y = batch()
    one, two = (DDPNOpt(each, weight_grads=True) for each in (model, twin))
    for _ in range(3):
        loss = F.cross_entropy(model(x), y)
        torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        for opt, each in ((one, loss), (two, F.cross_entropy(twin(x), y))):
            opt.zero_grad()
            each.backward()
            opt.step()
    close(model, twin)


class Kinds(nn.Module):
    """Layers of all kinds, one of them used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(7, 6), nn.LayerNorm(6)
        self.conv, self.batch_norm = nn.Conv1d(6, 6, 3, padding=1), nn.BatchNorm1d(6)
        self.attend, self.twice = nn.MultiheadAttention(6, 2, batch_first=True), nn.Linear(6, 6)
        self.last = nn.Linear(6, 3, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.words(ids))
        x = torch.relu(self.batch_norm(self.conv(x.mT))).mT
        x = x + self.attend(x, x, x, need_weights=False)[0]
        return self.last(torch.tanh(self.twice(torch.tanh(self.twice(x)))).mean(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("asked", ["all", "first", "last"])
def test_gradients_by_the_weights_are_those_of_autograd_and_leave_the_steps_alone(asked: str) -> None:
    """Those of sharpness-aware steps, or of tasks that are weighted by the norms of their gradients."""
    model = Kinds()
    twin, plain = copy.deepcopy(model), copy.deepcopy(model)
    ids, y = torch.randint(7, (8, 4)), torch.arange(8) % 3
    one, two = DDPNOpt(model), DDPNOpt(twin)
    for k in range(5):
        plain.load_state_dict(model.state_dict())
        loss = F.cross_entropy(model(ids), y)
        wanted, found = ({"all": list(m.parameters()), "first": [m.words.weight], "last": [m.last.weight]}[asked]
                         for m in (plain, model))  # fmt: skip
        expected = torch.autograd.grad(F.cross_entropy(plain(ids), y), wanted)
        with warnings.catch_warnings():
            warnings.simplefilter("error" if k else "ignore")
            got = torch.autograd.grad(loss, found, retain_graph=True)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)
        for opt, each in ((one, loss), (two, F.cross_entropy(twin(ids), y))):
            opt.zero_grad()
            each.backward()
            opt.step()
    close(model, twin)


def test_asking_for_gradients_by_the_weights_is_told() -> None:
    model = network()
    x, y = batch()
    opt = DDPNOpt(model)
    with pytest.warns(TrainingWarning, match="weight_grads=True"):
        torch.autograd.grad(F.cross_entropy(model(x), y), model[2].weight)
    F.cross_entropy(model(x), y).backward()
    opt.step()
    F.cross_entropy(model(x), y).backward()
    assert all(p.grad is not None for p in model.parameters())


# -- passes that the hooks do not see ----------------------------------------------------------------------------------


def test_layers_called_outside_of_the_model_are_trained_without_feedback_and_a_warning_says_so() -> None:
    model = network()
    x, y = batch()
    opt = DDPNOpt(model)
    before = F.cross_entropy(model(x), y).item()
    F.cross_entropy(model[2](model[1](model[0](x))), y).backward()
    with pytest.warns(OpenLoopWarning, match=r"Call the model itself, model\(inputs\)"):
        opt.step()
    for _ in range(30):
        opt.zero_grad()
        F.cross_entropy(model[2](model[1](model[0](x))), y).backward()
        opt.step()
    assert F.cross_entropy(model(x), y).item() < 0.7 * before


def test_gradients_set_by_hand_are_used_once() -> None:
    model = network()
    x, y = batch()
    opt = DDPNOpt(model)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    found = torch.func.grad(lambda w: F.cross_entropy(torch.func.functional_call(model, w, (x,)), y))(weights)
    for name, p in model.named_parameters():
        p.grad = found[name]
    with pytest.warns(OpenLoopWarning):
        opt.step()
    with pytest.raises(StepError):
        opt.step()


# -- kinds of parameters -----------------------------------------------------------------------------------------------


class Spectral(nn.Module):
    """A complex weight between two transforms."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)
        self.weight = nn.Parameter(torch.randn(5, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        f = torch.fft.rfft(self.first(x)) * self.weight
        found: Tensor = self.last(torch.fft.irfft(f, n=8))
        return found


class Bags(nn.Module):
    """Sparse embeddings, one of single ids and one of bags."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.bag = nn.Embedding(9, 6, sparse=True), nn.EmbeddingBag(9, 6, sparse=True)
        self.last = nn.Linear(6, 3)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.last(self.one(ids).mean(1) + self.bag(ids))
        return found


@pytest.mark.filterwarnings("ignore::ddpnopt.errors.OpenLoopWarning")
@pytest.mark.parametrize("weight_grads", [False, True])
@pytest.mark.parametrize("kind", [Spectral, Bags])
def test_complex_and_sparse_parameters_are_trained(kind: type[nn.Module], weight_grads: bool) -> None:
    torch.manual_seed(0)
    model = kind()
    x = torch.randn(16, 8) if kind is Spectral else torch.randint(9, (16, 4))
    y = torch.randint(3, (16,))
    opt = DDPNOpt(model, weight_grads=weight_grads)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses = []
    for _ in range(40):
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert all(not torch.equal(before[name], p) for name, p in model.named_parameters())


def test_a_layer_in_a_new_parameter_group_gets_feedback() -> None:
    model = network()
    model[0].requires_grad_(False)
    x, y = batch()
    opt = DDPNOpt(model)
    F.cross_entropy(model(x), y).backward()
    opt.step()
    model[0].requires_grad_(True)
    opt.add_param_group({"params": list(model[0].parameters())})
    opt.zero_grad()
    F.cross_entropy(model(x), y).backward()
    opt.step()
    assert opt.report.open_loop == []


def test_a_term_in_a_loose_parameter_alone_is_a_part_of_each_samples_loss() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.log_scale = nn.Parameter(torch.zeros(2))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x * torch.exp(-self.log_scale), self.log_scale.sum()

    torch.manual_seed(0)
    model = Scaled()
    x = 0.3 * torch.randn(64, 2)
    opt = DDPNOpt(model)
    for _ in range(300):
        opt.zero_grad()
        z, log_det = model(x)
        (0.5 * z.square().sum(1).mean() + log_det + 3.0).backward()
        opt.step()
    torch.testing.assert_close(model.log_scale.exp(), x.square().mean(0).sqrt(), rtol=0.3, atol=0.05)


# -- passes inside a transform of torch.func ---------------------------------------------------------------------------


def test_a_loss_with_jacobians_by_torch_func_is_trained_by_its_whole_gradient_and_a_warning_says_so() -> None:
    model = network()
    x, wanted = batch()[0], torch.randn(3, 5)

    def loss() -> Tensor:
        weights = dict(model.named_parameters())
        one = torch.func.jacrev(lambda v: torch.func.functional_call(model, weights, (v,)))
        return model(x).square().mean() + F.mse_loss(torch.func.vmap(one)(x), wanted.expand(16, 3, 5))

    expected = torch.autograd.grad(loss(), list(model.parameters()), allow_unused=True)
    opt = DDPNOpt(model)
    loss().backward()
    with pytest.warns(OpenLoopWarning, match="inside a transform of torch.func"):
        opt.step()
    for p, g in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, g)
    before = loss().item()
    for _ in range(40):
        opt.zero_grad()
        loss().backward()
        opt.step()
    assert loss().item() < 0.8 * before


def test_jacobians_that_are_not_part_of_the_loss_change_nothing() -> None:
    model = network()
    twin = copy.deepcopy(model)
    x, y = batch()
    for each, looks in ((model, True), (twin, False)):
        opt = DDPNOpt(each)
        for _ in range(3):
            opt.zero_grad()
            F.cross_entropy(each(x), y).backward()
            if looks:
                torch.func.vmap(torch.func.jacrev(each))(x)
            opt.step()
        assert opt.report.open_loop == []
    close(model, twin)


# -- derivatives inside the backward pass of the loss ------------------------------------------------------------------


class Equilibrium(nn.Module):
    """A fixed point, differentiated implicitly by a hook that solves for the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.cell, self.out = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.cell.weight.data *= 0.5

    def forward(self, x: Tensor) -> Tensor:
        u = self.into(x)
        with torch.no_grad():
            z = torch.zeros_like(u)
            for _ in range(30):
                z = torch.tanh(self.cell(z) + u)
        z = torch.tanh(self.cell(z) + u)
        if torch.is_grad_enabled():
            start = z.detach().requires_grad_()
            again = torch.tanh(self.cell(start) + u.detach())

            def solve(grad: Tensor) -> Tensor:
                found = grad
                for _ in range(30):
                    found = torch.autograd.grad(again, start, found, retain_graph=True)[0] + grad
                return found

            z.register_hook(solve)
        found: Tensor = self.out(z)
        return found


def test_products_with_a_jacobian_in_a_hook_do_not_count_as_the_gradient_of_the_loss() -> None:
    torch.manual_seed(0)
    model = Equilibrium()
    x, y = batch()
    wanted = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    opt = DDPNOpt(model)
    for steps in range(5):  # another part of the capture watches the first steps
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        (recording,) = opt._capture.arrivals.take_all()
        found = {p: g for r in recording.layers for p, g in zip(r.parameters, own_gradient(r), strict=True)}
        for p, g in zip(model.parameters(), wanted, strict=True):
            torch.testing.assert_close(found[p], g)
        opt._capture.untouched.steps_left = max(0, 2 - steps)
        opt._capture.arrivals.clear()
    for _ in range(40):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
    assert F.cross_entropy(model(x), y).item() < 0.3


def test_hooks_on_parameters_see_the_gradients() -> None:
    torch.manual_seed(0)
    model = network()
    x, y = batch()
    seen: dict[str, list[Tensor]] = {}
    for name, p in model.named_parameters():
        p.register_hook(lambda grad, name=name: seen.setdefault(name, []).append(grad.clone()))
    opt = DDPNOpt(model)
    for _ in range(5):
        twin = copy.deepcopy(model)
        F.cross_entropy(twin(x), y).backward()
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for name, p in twin.named_parameters():
            assert p.grad is not None
            torch.testing.assert_close(seen[name][-1], p.grad)
        opt.step()
    assert {len(each) for each in seen.values()} == {5}
