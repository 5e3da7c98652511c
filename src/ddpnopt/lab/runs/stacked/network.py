"""R fully connected networks of one shape as one: weights (R, O, J), inputs (R, B, J).

J counts the constant input that carries the bias, so that u = (W, b) of a layer is one matrix and x~ = (x, 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddpnopt.linear.layer import Layer, Parts

ACTIVATIONS: dict[type[nn.Module], str] = {nn.Tanh: "tanh", nn.ReLU: "relu", nn.Sigmoid: "sigmoid"}


def activations(model: nn.Module) -> list[str] | None:
    """What follows each linear layer ("" for nothing), or None where the model is no plain chain of them."""
    if not isinstance(model, nn.Sequential):
        return None
    modules = list(model)
    if modules and isinstance(modules[0], nn.Flatten):
        modules = modules[1:]
    found: list[str] = []
    for module in modules:
        if type(module) is nn.Linear and module.bias is not None:
            found.append("")
        elif type(module) in ACTIVATIONS and found and not found[-1]:
            found[-1] = ACTIVATIONS[type(module)]
        else:
            return None
    return found or None


def weights(models: Sequence[nn.Module]) -> list[Tensor]:
    """The weights of every layer with the bias as last column, stacked over the models."""
    layers = zip(*([m for m in model.modules() if isinstance(m, nn.Linear)] for model in models), strict=True)
    return [torch.stack([torch.cat([m.weight, m.bias[:, None]], 1).detach() for m in each]) for each in layers]


def apply(activation: str, h: Tensor) -> Tensor:
    if activation == "tanh":
        return h.tanh()
    if activation == "relu":
        return h.relu()
    return h.sigmoid() if activation == "sigmoid" else h


def derivative(activation: str, out: Tensor) -> Tensor | None:
    """sigma' as a function of the output of sigma; None for 1."""
    if activation == "tanh":
        return 1 - out.square()
    if activation == "relu":
        return (out > 0).to(out.dtype)
    return out * (1 - out) if activation == "sigmoid" else None


def second_derivative(activation: str, out: Tensor) -> Tensor | None:
    """sigma'' as a function of the output of sigma; None for 0."""
    if activation == "tanh":
        return -2 * out * (1 - out.square())
    return out * (1 - out) * (1 - 2 * out) if activation == "sigmoid" else None


def augmented(x: Tensor) -> Tensor:
    """x~ = (x, 1)."""
    return F.pad(x, (0, 1), value=1.0)


def outputs(kinds: Sequence[str], U: Sequence[Tensor], x: Tensor) -> Tensor:
    """The logits (R, B, C) for inputs (R, B, n)."""
    for kind, u in zip(kinds, U, strict=True):
        x = apply(kind, torch.baddbmm(u[:, None, :, -1], x, u[:, :, :-1].mT))
    return x


@dataclass(frozen=True)
class StackedLinear(Layer):
    """One layer of all networks, as the curvatures see it: a layer with R groups, inputs (B, R, J).

    Parts have one entry, the joint form (R, O, J) itself.
    """

    weight_shape: tuple[int, ...]
    bias: bool = False

    @property
    def groups(self) -> int:  # type: ignore[override]
        return self.weight_shape[0]

    def apply(self, x: Tensor, u: Parts) -> Tensor:
        return (x.transpose(0, 1) @ u[0].mT).transpose(0, 1)

    def input_grad(self, v: Tensor, weight: Tensor, x_shape: torch.Size) -> Tensor:
        return (v.transpose(0, 1) @ weight).transpose(0, 1)

    def grad(self, x: Tensor, v: Tensor) -> Parts:
        return [v.permute(1, 2, 0) @ x.transpose(0, 1)]

    def patches(self, x: Tensor) -> Tensor:
        return x[:, None]

    def rows(self, h: Tensor) -> Tensor:
        return h[:, None]

    def unrows(self, rows: Tensor) -> Tensor:
        return rows[:, 0].flatten(1)

    def join(self, u: Parts) -> Tensor:
        return u[0]

    def split(self, joint: Tensor) -> Parts:
        return [joint]
