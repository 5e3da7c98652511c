"""Bad input is told by an error that names the layer or the option, and leaves everything as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from optimizer_networks import Residual, cnn, equal, fcn, images, same, snapshot, train, vectors, weights
from torch import Tensor, nn

from ddpnopt import EKFAC, KFAC, Adam, DDPNOpt, ModelError, NonFiniteError, OptionError, RMSprop, StepError

VALUES = ["outer", "batch", "full"]


def backward(model: nn.Module, factor: float = 1.0) -> None:
    x, y = vectors()
    (factor * F.cross_entropy(model(x), y)).backward()


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": -0.1}, "lr=-0.1.*zero or positive"),
        ({"momentum": -0.5}, "momentum=-0.5.*zero or positive"),
        ({"weight_decay": -1.0}, "weight_decay=-1.0.*zero or positive"),
        ({"value": "full", "vxx_reg": -1e-3}, "vxx_reg=-0.001.*zero or positive"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"value": "inner"}, "value='inner'.*outer"),
        ({"terminal": "hinge"}, "terminal='hinge'.*sqrt"),
        ({"terminal": 3}, "terminal=3.*callable"),
        ({"curvature": "adagrad"}, "curvature='adagrad'.*rmsprop"),
        ({"curvature": 3}, "curvature=3"),
        ({"reduction": "none"}, "reduction='none'.*'sum'"),
        ({"on_nonfinite": "ignore"}, "on_nonfinite='ignore'.*'skip'"),
        ({"value": "full", "order": 3}, "order=3.*1 or 2"),
        ({"order": 2}, "order=2 has no effect.*needs value='full'"),
        ({"order": 2, "value": "outer"}, "order=2 has no effect.*needs value='full'"),
        ({"vxx_reg": 0.1}, "vxx_reg=0.1 has no effect.*needs value='full'"),
        (
            {"value": "outer", "terminal": "cross_entropy"},
            "terminal='cross_entropy'.*one column per sample",
        ),
        ({"curvature": "adam", "momentum": 0.9}, "momentum.*betas"),
        ({"exclude": ["nowhere"]}, "exclude.*nowhere"),
    ],
    ids=lambda case: str(case) if isinstance(case, dict) else "",
)
def test_an_option_that_makes_no_sense_is_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        DDPNOpt(fcn(), **{"lr": 0.1, **options})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: KFAC(damping=-1.0), "damping=-1.0.*positive"),
        (lambda: KFAC(damping=0.0), "damping=0.0.*positive"),
        (lambda: KFAC(refresh=0), "refresh=0.*integer"),
        (lambda: KFAC(decay=1.0), "decay=1.0"),
        (lambda: EKFAC(damping=-1.0), "damping=-1.0.*positive"),
        (lambda: EKFAC(refresh=0), "refresh=0.*integer"),
        (lambda: EKFAC(refresh=2.5), "refresh=2.5.*integer"),
        (lambda: RMSprop(alpha=1.5), "alpha=1.5"),
        (lambda: RMSprop(eps=0.0), "eps=0.0"),
        (lambda: Adam(betas=(0.9, 1.0)), r"betas\[1\]=1.0"),
        (lambda: Adam(betas=(-0.1, 0.9)), r"betas\[0\]=-0.1"),
    ],
)
def test_a_setting_of_a_curvature_that_makes_no_sense_is_named(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        make()


def test_a_negative_lr_in_one_group_is_named() -> None:
    model = fcn()
    with pytest.raises(OptionError, match="lr=-1"):
        DDPNOpt(model, lr=0.1, params=[{"params": model[0].parameters(), "lr": -1}], value="outer")


def test_momentum_in_a_group_beside_adam_is_refused() -> None:
    model = fcn()
    with pytest.raises(OptionError, match="momentum"):
        DDPNOpt(
            model, lr=0.1, curvature="adam", params=[{"params": model.parameters(), "momentum": 0.9}], value="outer"
        )


def test_a_missing_lr_is_named() -> None:
    with pytest.raises(OptionError, match="lr"):
        DDPNOpt(fcn(), value="outer")


def test_parameters_in_place_of_a_model_are_told_so() -> None:
    with pytest.raises(OptionError, match=r"nn\.Module"):
        DDPNOpt(fcn().parameters(), lr=0.1, value="outer")


def test_a_parameter_of_another_model_is_refused() -> None:
    with pytest.raises(OptionError, match=r"shape \(6, 5\).*does not belong"):
        DDPNOpt(fcn(), lr=0.1, params=fcn().parameters(), value="outer")
    opt = DDPNOpt(model := fcn(), lr=0.1, params=model[0].parameters(), value="outer")
    with pytest.raises(OptionError, match="does not belong"):
        opt.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


@pytest.mark.parametrize("option", ["lr", "momentum"])
def test_weight_and_bias_in_groups_of_different_settings_name_the_layer(option: str) -> None:
    model = fcn()
    rest = [model[0].weight, *model[2].parameters(), *model[4].parameters()]
    opt = DDPNOpt(model, lr=0.1, params=[{"params": [model[0].bias], option: 0.25}, {"params": rest}], value="outer")
    before = weights(model)
    backward(model)
    with pytest.raises(OptionError, match=f"layer '0'.*{option}"):
        opt.step()
    assert same(before, model)


@pytest.mark.parametrize("value", ["outer", "batch"])
@pytest.mark.parametrize("terminal", [lambda z: z[:, :1], lambda z: z.sum(), lambda z: z[0]])
def test_a_callable_terminal_of_the_wrong_shape_is_told_the_right_one(terminal: Any, value: str) -> None:
    model = fcn()
    opt = DDPNOpt(model, lr=0.1, terminal=terminal, value=value)
    before = weights(model)
    backward(model)
    with pytest.raises(OptionError, match=r"terminal.*\(8, 3\)"):
        opt.step()
    assert same(before, model)


def test_a_callable_hessian_of_the_wrong_shape_is_told_the_right_one() -> None:
    model = fcn()
    opt = DDPNOpt(model, lr=0.1, terminal=lambda z: z, value="full")
    backward(model)
    with pytest.raises(OptionError, match=r"terminal.*\(8, 3, 3\)"):
        opt.step()


def test_several_columns_are_too_many_for_the_outer_form() -> None:
    model = fcn()
    opt = DDPNOpt(model, lr=0.1, terminal=lambda z: torch.stack([z, z], 2), value="outer")
    backward(model)
    with pytest.raises(OptionError, match="2 columns"):
        opt.step()


# -- models ------------------------------------------------------------------------------------------------------------


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 3), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.b(x)


@pytest.mark.parametrize(
    "model",
    [nn.Sequential(nn.Embedding(4, 3), nn.LayerNorm(3)), nn.ConvTranspose2d(1, 1, 2), nn.GRU(3, 3)],
    ids=["embedding", "transposed", "recurrent"],
)
def test_a_model_without_a_supported_layer_is_told_what_is_needed(model: nn.Module) -> None:
    with pytest.raises(ModelError, match=r"nn\.Linear.*nn\.Conv"):
        DDPNOpt(model, lr=0.1, value="outer")


def test_a_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(ModelError, match="no trainable parameters"):
        DDPNOpt(fcn().requires_grad_(False), lr=0.1, value="outer")


def test_excluding_every_layer_is_refused() -> None:
    with pytest.raises(ModelError, match="excluded"):
        DDPNOpt(nn.Sequential(nn.Linear(3, 3)), lr=0.1, exclude=["0"], value="outer")


def test_a_layer_that_runs_twice_is_named_and_the_way_out_works() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.again, self.last = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.first(x))
            return self.last(torch.tanh(self.again(torch.tanh(self.again(x)))))

    model = Twice()
    opt = DDPNOpt(model, lr=0.1, value="outer")
    with pytest.raises(ModelError, match=r"'again'.*twice.*exclude=\['again'\]"):
        backward(model)
    assert all(p.requires_grad for p in model.parameters())
    del opt
    opt = DDPNOpt(model, lr=0.1, exclude=["again"], value="outer")
    before = weights(model)
    backward(model)
    with pytest.warns(match=r"again\.weight"):
        opt.step()
    assert not any(map(torch.equal, before, model.parameters()))


def test_a_batch_dimension_that_differs_between_layers_names_both() -> None:
    class Flattens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.flat = nn.Linear(5, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.flat(torch.tanh(self.tokens(x)).flatten(0, 1))

    model = Flattens()
    opt = DDPNOpt(model, lr=0.1, value="outer")
    before = weights(model)
    model(torch.randn(4, 6, 5)).square().mean().backward()
    with pytest.raises(ModelError, match=r"'flat'.*\(24, 4\).*'tokens'.*\(4, 6, 5\)"):
        opt.step()
    assert same(before, model)


def test_an_input_without_a_batch_dimension_is_refused() -> None:
    model = fcn()
    opt = DDPNOpt(model, lr=0.1, value="outer")
    model(torch.randn(5)).square().sum().backward()
    with pytest.raises(ModelError, match="batch"):
        opt.step()


@pytest.mark.parametrize("value", ["outer", "batch"])
def test_an_image_without_a_batch_dimension_is_refused(value: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.Tanh(), nn.Conv2d(3, 3, 3))
    opt = DDPNOpt(model, lr=0.1, value=value)
    model(torch.randn(3, 6, 6)).square().sum().backward()
    with pytest.raises(ModelError, match="batch"):
        opt.step()


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


def test_step_after_two_backward_passes_through_one_forward_pass() -> None:
    model = fcn()
    opt = DDPNOpt(model, lr=0.1, value="outer")
    before = weights(model)
    x, y = vectors()
    loss = F.cross_entropy(model(x), y)
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(StepError, match=r"2 backward passes.*zero_grad"):
        opt.step()
    assert same(before, model)


def test_after_a_refused_step_the_next_one_works() -> None:
    model = fcn()
    opt = DDPNOpt(model, lr=0.1, value="outer")
    x, y = vectors()
    loss = F.cross_entropy(model(x), y)
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(StepError):
        opt.step()
    before = weights(model)
    train(model, opt, vectors, 1)
    assert not any(map(torch.equal, before, model.parameters()))


def test_training_in_eval_mode_says_to_call_train() -> None:
    model = fcn().eval()
    opt = DDPNOpt(model, lr=0.1, value="outer")
    backward(model)
    with pytest.raises(StepError, match=r"eval mode.*model\.train\(\)"):
        opt.step()


# -- numbers that are not finite ---------------------------------------------------------------------------------------

CURVATURES = ["identity", "rmsprop", "adam", "kfac", "ekfac"]


def started(value: str, curvature: str = "identity", **options: Any) -> tuple[nn.Module, DDPNOpt]:
    """Two steps in, so that there is state to spoil."""
    model = fcn()
    momentum = 0.0 if curvature == "adam" else 0.9
    opt = DDPNOpt(model, lr=0.01, value=value, curvature=curvature, momentum=momentum, **options)
    train(model, opt, vectors, 2)
    return model, opt


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("curvature", CURVATURES)
@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_raise_leaves_weights_and_state_bit_for_bit(factor: float, curvature: str, value: str) -> None:
    model, opt = started(value, curvature)
    before, state = weights(model), snapshot(opt.state_dict())
    opt.zero_grad()
    backward(model, factor)
    with pytest.raises(NonFiniteError, match=r"not finite.*on_nonfinite='skip'"):
        opt.step()
    assert same(before, model)
    assert equal(state, opt.state_dict())


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("feedback", [True, False])
def test_skip_counts_leaves_everything_and_goes_on(feedback: bool, value: str) -> None:
    model, opt = started(value, on_nonfinite="skip", feedback=feedback)
    before, state = weights(model), snapshot(opt.state_dict())
    for n in (1, 2):
        opt.zero_grad()
        backward(model, float("nan"))
        opt.step()
        assert opt.report.skipped == n
        assert opt.report.step == 2
        assert same(before, model)
        assert equal(state, opt.state_dict())
    train(model, opt, vectors, 1)
    assert opt.report.step == 3
    assert not any(map(torch.equal, before, model.parameters()))


def test_a_skipped_step_leaves_no_trace_in_what_follows() -> None:
    results = []
    for spoil in (True, False):
        torch.manual_seed(0)
        model, opt = started("outer", "adam", on_nonfinite="skip")
        if spoil:
            opt.zero_grad()
            backward(model, float("nan"))
            opt.step()
        train(model, opt, vectors, 3)
        results.append(weights(model))
    assert same(*results)


def huge_step(opt: DDPNOpt, model: nn.Module, data: Callable[..., tuple[Tensor, Tensor]], factor: float) -> None:
    for group in opt.param_groups:
        group["lr"] = 3e38
    x, y = data(seed=7)
    opt.zero_grad()
    (factor * F.cross_entropy(model(x.float()), y)).backward()
    opt.step()


@pytest.mark.parametrize("options", [{"value": "outer"}, {"value": "full"}, {"feedback": False}], ids=str)
@pytest.mark.parametrize("curvature", ["identity", "kfac"])
@pytest.mark.parametrize("net", ["fcn", "cnn"])
def test_an_update_that_overflows_leaves_weights_and_state_bit_for_bit(
    net: str, curvature: str, options: dict[str, Any]
) -> None:
    model, data = (fcn().float(), vectors) if net == "fcn" else (cnn().float(), images)
    opt = DDPNOpt(model, lr=0.01, curvature=curvature, momentum=0.5, **options)
    train(model, opt, data, 2)
    before, state = weights(model), snapshot(opt.state_dict()["state"])
    with pytest.raises(NonFiniteError):
        huge_step(opt, model, data, 1e5)
    assert same(before, model)
    assert equal(state, opt.state_dict()["state"])


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("curvature", CURVATURES)
@pytest.mark.parametrize("net", ["fcn", "cnn"])
def test_whatever_the_learning_rate_the_step_is_refused_or_finite(net: str, curvature: str, value: str) -> None:
    model, data = (fcn().float(), vectors) if net == "fcn" else (cnn().float(), images)
    opt = DDPNOpt(model, lr=0.01, value=value, curvature=curvature, on_nonfinite="skip")
    train(model, opt, data, 2)
    before, state = weights(model), snapshot(opt.state_dict()["state"])
    huge_step(opt, model, data, 1.0)
    if opt.report.skipped:
        assert same(before, model)
        assert equal(state, opt.state_dict()["state"])
    else:
        assert model(data(seed=7)[0].float()).isfinite().all()


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("curvature", CURVATURES)
def test_a_gradient_whose_square_overflows_is_skipped_or_survived(curvature: str, value: str) -> None:
    model = fcn().float()
    opt = DDPNOpt(model, lr=1e-3, value=value, curvature=curvature, on_nonfinite="skip")
    train(model, opt, vectors, 1)
    for group in opt.param_groups:
        group["lr"] = 1e-30
    before = weights(model)
    opt.zero_grad()
    x, y = vectors()
    (1e25 * F.cross_entropy(model(x.float()), y)).backward()
    opt.step()
    assert all(p.isfinite().all() for p in model.parameters())
    assert opt.report.skipped == 0 or same(before, model)
