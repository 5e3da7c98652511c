"""The full value Hessian in factors is the full value Hessian."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddpnopt import DDPNOpt
from ddpnopt.ddp.value import Factored, Full
from ddpnopt.ddp.value.full import _positive
from ddpnopt.errors import NonFiniteError

CURVATURES = ["identity", "rmsprop", "adam", "kfac", "ekfac"]


def chain(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "fcn":
        layers = [nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.Sigmoid(), nn.Linear(5, 3)]
    else:
        layers = [nn.Conv2d(1, 2, 3), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(8, 6), nn.Softmax(1)]
        layers += [nn.Linear(6, 3)]
    return nn.Sequential(*layers).double()


def exact_hessian(z: Tensor) -> Tensor:
    s = torch.softmax(z, 1)
    return torch.diag_embed(s) - s[:, :, None] * s[:, None, :]


def train(kind: str, used: list[str], **options: object) -> tuple[nn.Module, DDPNOpt]:
    model = chain(kind)
    opt = DDPNOpt(model, 0.3, value="full", diagnostics=True, **options)  # type: ignore[arg-type]
    start = opt.form.start

    def watched(*args: object) -> object:
        made = start(*args)  # type: ignore[arg-type]
        used.append(type(made[1]).__name__)
        return made

    object.__setattr__(opt.form, "start", watched)
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        shape = (16, 6) if kind == "fcn" else (16, 1, 6, 6)  # more than directions: EKFAC has one eigenbasis
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        y = torch.randint(0, 3, (16,), generator=generator)
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
    return model, opt


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("curvature", CURVATURES)
@pytest.mark.parametrize("kind", ["fcn", "cnn"])
def test_factors_and_matrices_give_the_same_weights(kind: str, curvature: str, weight_decay: float) -> None:
    used: list[str] = []
    options = {"curvature": curvature, "weight_decay": weight_decay}
    factors, a = train(kind, used, terminal="cross_entropy", **options)
    matrices, b = train(kind, used, terminal=exact_hessian, **options)
    assert used == [Factored.__name__] * 4 + [Full.__name__] * 4
    for one, other in zip(factors.parameters(), matrices.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
    assert a.report.guarded == b.report.guarded


def test_more_columns_than_units_take_the_matrix() -> None:
    used: list[str] = []
    model = nn.Sequential(nn.Linear(6, 2), nn.Tanh(), nn.Linear(2, 3)).double()
    opt = DDPNOpt(model, 0.3, value="full", terminal="cross_entropy")
    start = opt.form.start

    def watched(*args: object) -> object:
        made = start(*args)  # type: ignore[arg-type]
        used.append(type(made[1]).__name__)
        return made

    object.__setattr__(opt.form, "start", watched)
    F.cross_entropy(model(torch.randn(4, 6, dtype=torch.float64)), torch.tensor([0, 1, 2, 0])).backward()
    opt.step()
    assert used == [Full.__name__]


def test_a_value_hessian_that_is_not_finite_is_named() -> None:
    V = torch.eye(3).repeat(2, 1, 1)
    V[1, 0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="V_xx is not finite"):
        _positive(V)
    V[1, 0, 0] = -1.0
    assert torch.equal(_positive(V)[1], torch.diag(torch.tensor([0.0, 1.0, 1.0])))
