"""A bad model or a wrong order of calls raises an error that names the layer and leaves everything as it was."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from optimizer_networks import Residual, fcn, same, train, vectors, weights
from torch import Tensor, nn

from ddpnopt import DDPNOpt, ModelError, OpenLoopWarning, StepError


def backward(model: nn.Module, factor: float = 1.0) -> None:
    x, y = vectors()
    (factor * F.cross_entropy(model(x), y)).backward()


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 3), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.b(x)


@pytest.mark.parametrize(
    "model",
    [nn.Sequential(nn.EmbeddingBag(4, 3), nn.PReLU()), nn.ConvTranspose2d(1, 1, 2), nn.LSTM(3, 3, proj_size=2)],
    ids=["embedding", "transposed", "recurrent"],
)
def test_a_model_without_a_supported_layer_is_told_what_is_needed(model: nn.Module) -> None:
    with pytest.raises(ModelError, match=r"nn\.Linear.*nn\.Conv"):
        DDPNOpt(model, lr=0.1, value="full", terminal="gn")


def test_a_model_of_unsupported_layers_is_trained_all_the_same() -> None:
    model = nn.Sequential(nn.EmbeddingBag(4, 3, mode="max"), nn.PReLU())
    opt = DDPNOpt(model)
    ids = torch.arange(12).view(4, 3) % 4
    losses = []

    def step() -> None:
        opt.zero_grad()
        loss = (model(ids) - 1).square().mean()
        loss.backward()
        opt.step()
        losses.append(loss.item())

    with pytest.warns(OpenLoopWarning, match=r"0\.weight"):
        step()
    for _ in range(30):
        step()
    assert losses[-1] < 0.1 * losses[0]


def test_a_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(ModelError, match="no trainable parameters"):
        DDPNOpt(fcn().requires_grad_(False), lr=0.1, value="outer")


def test_lazy_modules_that_have_not_run_are_named_and_one_batch_is_the_way_out() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.LazyLinear(3))
    with pytest.raises(ModelError, match=r"2\.weight, 2\.bias of lazy modules.*run one batch"):
        DDPNOpt(model)
    model(vectors()[0])
    train(model, opt := DDPNOpt(model), vectors, 2)
    assert opt.report.open_loop == []


def test_excluding_every_layer_is_refused() -> None:
    with pytest.raises(ModelError, match="excluded"):
        DDPNOpt(nn.Sequential(nn.Linear(3, 3)), lr=0.1, exclude=["0"], value="outer")


@pytest.mark.parametrize("value", ["full"])
def test_a_layer_that_runs_twice_is_named_and_the_way_out_works(value: str) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(5, 4), nn.Linear(4, 3)
            self.again = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.first(x))[:, None]
            return self.last(torch.tanh(self.again(torch.tanh(self.again(x))))[:, 0])

    model = Twice()
    opt = DDPNOpt(model, lr=0.1, value=value)
    with pytest.raises(ModelError, match=r"'again'.*twice.*exclude=\['again'\]"):
        backward(model)
    assert all(p.requires_grad for p in model.parameters())
    del opt
    opt = DDPNOpt(model, lr=0.1, exclude=["again"], value=value)
    before = weights(model)
    backward(model)
    with pytest.warns(match=r"again\.weight"):
        opt.step()
    assert not any(map(torch.equal, before, model.parameters()))


def test_a_batch_dimension_that_differs_between_layers_of_a_full_form_names_both() -> None:
    class Flattens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.flat = nn.Linear(5, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.flat(torch.tanh(self.tokens(x)).flatten(0, 1))

    model = Flattens()
    opt = DDPNOpt(model, lr=0.1, value="full")
    before = weights(model)
    model(torch.randn(4, 6, 5)).square().mean().backward()
    with pytest.raises(ModelError, match=r"'flat'.*\(24, 4\).*'tokens'.*\(4, 6, 5\)"):
        opt.step()
    assert same(before, model)


def test_an_input_without_a_batch_dimension_is_refused_by_the_full_form() -> None:
    model = fcn()
    opt = DDPNOpt(model, lr=0.1, value="full")
    model(torch.randn(5)).square().sum().backward()
    with pytest.raises(ModelError, match="batch"):
        opt.step()


@pytest.mark.parametrize("value", ["outer", "batch"])
@pytest.mark.parametrize("kind", ["vector", "image"])
def test_an_input_without_a_batch_dimension_is_a_batch_of_one_elsewhere(value: str, kind: str) -> None:
    model = fcn() if kind == "vector" else nn.Sequential(nn.Conv2d(3, 3, 3), nn.Tanh(), nn.Conv2d(3, 3, 3))
    twin = copy.deepcopy(model)
    x = torch.randn(5) if kind == "vector" else torch.randn(3, 6, 6)
    for each, inputs in ((model, x), (twin, x[None])):
        opt = DDPNOpt(each, lr=0.1, value=value)
        each(inputs).square().sum().backward()
        opt.step()
    torch.testing.assert_close(weights(model), weights(twin))


def test_full_on_a_residual_network_names_the_layer_and_a_way_out() -> None:
    model = Residual()
    opt = DDPNOpt(model, lr=0.1, value="full")
    before = weights(model)
    backward(model)
    with pytest.raises(ModelError, match=r"'last'.*value='batch'"):
        opt.step()
    assert same(before, model)


def test_full_on_batch_norm_names_the_module_and_a_way_out() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3))
    opt = DDPNOpt(model, lr=0.1, value="full")
    before, state = weights(model), [b.clone() for b in model.buffers()]
    backward(model)
    with pytest.raises(ModelError, match=r"'1'.*value='batch'"), pytest.warns():
        opt.step()
    assert same(before, model)
    assert model[1].num_batches_tracked == state[-1] + 1


def test_an_exact_hessian_with_two_outputs_says_how_many() -> None:
    model = TwoOutputs()
    opt = DDPNOpt(model, lr=0.1, value="batch", terminal="mse")
    x, _ = vectors()
    (model(x)[0].square().mean() + model(x)[1].square().mean()).backward()
    opt.zero_grad()
    one, two = model(x)
    (one.square().mean() + two.square().mean()).backward()
    with pytest.raises(ModelError, match="there are 2"):
        opt.step()


def test_the_exact_hessian_of_cross_entropy_on_sequences_says_what_to_use() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    opt = DDPNOpt(model, lr=0.1, value="batch", terminal="cross_entropy")
    F.cross_entropy(model(torch.randn(4, 6, 5)).flatten(0, 1), torch.zeros(24, dtype=torch.long)).backward()
    with pytest.raises(ModelError, match=r"\(4, 6, 3\).*'sampled'"):
        opt.step()


# -- the order of calls ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("curvature", ["identity", "kfac"])
def test_step_without_a_forward_pass(feedback: bool, curvature: str) -> None:
    opt = DDPNOpt(fcn(), lr=0.1, feedback=feedback, curvature=curvature, value="outer")
    with pytest.raises(StepError, match=r"forward pass|backward\(\)"):
        opt.step()


def test_step_after_a_forward_pass_of_layers_outside_the_model_call_says_so() -> None:
    model = fcn()
    opt = DDPNOpt(model, lr=0.1, value="outer")
    x, y = vectors()
    F.cross_entropy(model.forward(x), y).backward()
    with pytest.raises(StepError, match=r"model\(inputs\)"):
        opt.step()


def test_step_without_a_backward_pass() -> None:
    model = fcn()
    opt = DDPNOpt(model, lr=0.1, value="outer")
    model(vectors()[0])
    with pytest.raises(StepError, match=r"without a backward pass.*loss\.backward\(\)"):
        opt.step()


def test_a_second_step_on_the_same_gradients() -> None:
    model = fcn()
    opt = DDPNOpt(model, lr=0.1, value="outer")
    backward(model)
    opt.step()
    with pytest.raises(StepError, match="forward pass"):
        opt.step()


def test_after_a_refused_step_the_next_one_works() -> None:
    model = fcn()
    opt = DDPNOpt(model, lr=0.1, value="outer")
    model(vectors()[0])
    with pytest.raises(StepError):
        opt.step()
    before = weights(model)
    train(model, opt, vectors, 1)
    assert not any(map(torch.equal, before, model.parameters()))


def test_an_error_in_a_hook_on_a_norm_in_the_second_pass_leaves_the_weights_as_they_were() -> None:
    norm = nn.LayerNorm(6)
    model = nn.Sequential(nn.Linear(4, 6), norm, nn.Tanh(), nn.Linear(6, 3))
    passes: list[int] = []

    def refuse_the_second(module: nn.Module, args: object, out: Tensor) -> None:
        passes.append(1)
        if len(passes) == 2:
            raise ValueError("seen twice")

    norm.register_forward_hook(refuse_the_second)
    opt = DDPNOpt(model)
    F.cross_entropy(model(torch.randn(8, 4)), torch.randint(3, (8,))).backward()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match="seen twice"):
        opt.step()
    for p, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, old)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_scripted_model_is_refused_with_the_way_out() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    with pytest.raises(ModelError, match=r"torch\.compile"):
        DDPNOpt(scripted)


def test_a_model_of_complex_weights_alone_is_refused_with_the_reason_and_a_way_out() -> None:
    model = nn.Linear(3, 2, dtype=torch.complex64)
    with pytest.raises(ModelError, match=r"complex.*torch\.optim\.AdamW"):
        DDPNOpt(model)
