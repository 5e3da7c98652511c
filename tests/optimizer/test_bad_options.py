"""A bad option raises an error that names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from optimizer_networks import fcn, same, vectors, weights
from torch import nn

from ddpnopt import EKFAC, KFAC, Adam, DDPNOpt, OptionError, RMSprop


def backward(model: nn.Module, factor: float = 1.0) -> None:
    x, y = vectors()
    (factor * F.cross_entropy(model(x), y)).backward()


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


NO_EFFECT: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (name, {name: value}, form)
    for form, options in (
        (
            {"feedback": False, "lr": 0.1},
            {
                "relax": 0.5, "relax_samples": None, "dof": 0.5, "guard": True, "vxx_power": 2, "order": 1,
                "vxx_reg": 0.0, "terminal": "gn", "closed_loop": True, "open_loop_lr": 0.1,
                "recompute": False, "diagnostics": True,
            },
        ),
        ({"value": "outer", "lr": 0.1}, {"relax": 1.0, "relax_samples": 100.0, "dof": 1.0, "order": 1, "vxx_reg": 0.0}),
        ({"value": "full", "lr": 0.1}, {"relax": 1.0, "relax_samples": None, "dof": 1.0}),
        ({}, {"guard": False, "vxx_power": 1, "order": 1, "vxx_reg": 0.0}),
    )
    for name, value in options.items()
]  # fmt: skip


@pytest.mark.parametrize(("name", "option", "form"), NO_EFFECT, ids=lambda each: str(each))
def test_an_option_without_effect_is_refused_by_name(name: str, option: dict[str, Any], form: dict[str, Any]) -> None:
    DDPNOpt(fcn(), **form)
    with pytest.raises(OptionError, match=f"^{name}=.* has no effect with .*Leave {name} out"):
        DDPNOpt(fcn(), **form, **option)
