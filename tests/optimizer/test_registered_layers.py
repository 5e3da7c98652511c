"""Layers of other libraries and of the user: registered in one line, with the steps of `nn.Linear`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ddpnopt
from ddpnopt import DDPNOpt, OptionError
from ddpnopt.linear.transposed import TransposedLinear
from ddpnopt.trace.model_layers import describe


class Backwards(nn.Module):
    """h = x W + b."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(plain.weight.detach().T.clone()),
            nn.Parameter(plain.bias.detach().clone()),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


ddpnopt.register_layer(Backwards, lambda m: TransposedLinear(tuple(m.weight.shape), bias=True))  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize(
    "options",
    [{}, {"lr": 3.0}, {"lr": 0.1, "value": "outer"}, {"lr": 0.01, "curvature": "adam"}, {"curvature": "kfac"},
     {"lr": 0.1, "value": "outer", "curvature": "ekfac"}, {"lr": 0.1, "value": "full"}, {"terminal": "gn"}],
)  # fmt: skip
def test_a_layer_with_a_transposed_weight_takes_the_steps_of_a_linear_layer(
    options: dict[str, Any], tokens: bool
) -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    layers = [nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 3)]
    theirs = [layers[0], Backwards(layers[1]), Backwards(layers[2])]
    results = []
    for first, second, third in (theirs, layers):
        model = nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), third)
        before = [p.detach().clone() for p in model.parameters()]
        opt = DDPNOpt(model, **options)
        for seed in range(3):
            g = torch.Generator().manual_seed(seed)
            x = torch.randn(5, 7, 4, generator=g) if tokens else torch.randn(5, 4, generator=g)
            out = model(x)
            out = out.mean(1) if tokens else out
            F.cross_entropy(out, torch.randint(3, (5,), generator=g)).backward()
            opt.step()
        assert opt.report.open_loop == []
        results.append([p.detach().clone() for p in model.parameters()])
        with torch.no_grad():
            for p, old in zip(model.parameters(), before, strict=True):
                p.copy_(old)
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a.T if a.shape != b.shape else a, b)


def test_a_subclass_with_a_forward_of_its_own_is_not_the_registered_layer() -> None:
    class Other(Backwards):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    assert describe(Other(nn.Linear(2, 3))) is None
    assert describe(Backwards(nn.Linear(2, 3))) == TransposedLinear((2, 3), bias=True)


def test_something_else_than_a_module_class_is_refused() -> None:
    with pytest.raises(OptionError, match=r"nn\.Module"):
        ddpnopt.register_layer(nn.Linear(2, 3), lambda m: None)  # type: ignore[arg-type]


def test_the_linear_layer_of_transformers_has_feedback() -> None:
    library = pytest.importorskip("transformers.pytorch_utils")
    torch.manual_seed(0)
    layer = library.Conv1D(4, 3)
    assert describe(layer) == TransposedLinear((3, 4), bias=True)
