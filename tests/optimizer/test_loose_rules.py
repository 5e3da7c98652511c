"""Gradients of samples at loose parameters by rules are those that torch.func finds for the same uses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpnopt.trace import loose

B, N = 5, 4
POSITIONS = torch.arange(1, 4)  # which the model holds
Use = Callable[[Tensor, nn.ParameterList], Tensor]

USES: dict[str, tuple[Use, list[tuple[int, ...]]]] = {
    "sum": (lambda x, u: x + u[0], [(3, N)]),
    "product": (lambda x, u: x * u[0], [(N,)]),
    "part of a table": (lambda x, u: x + u[0][:, 1:4], [(1, 7, N)]),
    "rows of a table": (lambda x, u: x + F.embedding(torch.arange(1, 4), u[0]), [(6, N)]),
    "rows by a constant of the model": (lambda x, u: x + F.embedding(POSITIONS, u[0]), [(6, N)]),
    "another shape": (lambda x, u: x + u[0].view(1, 3, N), [(3 * N,)]),
    "value for all": (lambda x, u: u[0].expand(B, -1, -1), [(1, 3, N)]),
    "linear layer": (lambda x, u: F.linear(x, u[0]), [(6, N)]),
    "linear layer on rows": (lambda x, u: F.linear(x.flatten(0, 1), u[0]), [(6, N)]),
    "linear layer with a bias": (lambda x, u: F.linear(x, u[0], u[1]), [(6, N), (6,)]),
    "transposed linear layer": (lambda x, u: F.linear(x, u[0].t(), u[1]), [(N, 6), (6,)]),
    "matrix product": (lambda x, u: x @ u[0], [(N, 6)]),
    "head tied by hand": (lambda x, u: x @ u[0].T, [(6, N)]),
    "chosen rows": (lambda x, u: u[0][torch.arange(B * 3).view(B, 3) % 4], [(6, N)]),
    "ids of samples": (lambda x, u: F.embedding(torch.arange(B * 3).view(B, 3) % 4, u[0]), [(6, N)]),
    "transposed convolution": (
        lambda x, u: F.conv_transpose1d(x, u[0], u[1], (2,), (1,), (1,), 1, (1,)),
        [(3, 2, 3), (2,)],
    ),
}


def gradients_of(use: Use, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    torch.manual_seed(0)
    x, parameters = torch.randn(B, 3, N), nn.ParameterList([torch.randn(shape) for shape in shapes])
    with loose.Uses(parameters, lambda p: None, lambda: B, constants=[POSITIONS]) as uses:
        out = use(x, parameters)
    (torch.linspace(-1, 2, out.numel()).view_as(out) * out).sum().backward()
    found = uses.gradients()
    return [found[p] for p in parameters]


@pytest.mark.parametrize("name", USES)
def test_gradients_by_a_rule_are_those_of_the_general_form(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use, shapes = USES[name]
    asked: list[int] = []
    vmap = torch.func.vmap
    monkeypatch.setattr(torch.func, "vmap", lambda f: asked.append(1) or vmap(f))
    by_rule = gradients_of(use, shapes)
    assert not asked
    monkeypatch.setattr(loose, "gradients", lambda *args: None)
    monkeypatch.setattr(loose, "of_transposed_convolution", lambda *args: None)
    monkeypatch.setattr(loose, "of_linear", lambda *args: None)
    for rule, general in zip(by_rule, gradients_of(use, shapes), strict=True):
        torch.testing.assert_close(rule, general)
    assert asked


def test_a_table_with_a_row_that_gets_no_gradient_has_no_rule() -> None:
    by_use = gradients_of(lambda x, u: F.embedding(torch.arange(B * 3).view(B, 3) % 4, u[0], padding_idx=0), [(6, N)])
    assert not by_use[0].view(B, 6, N)[:, 0].any()
    assert by_use[0].any()
