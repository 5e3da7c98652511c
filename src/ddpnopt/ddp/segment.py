"""Whatever stands between two layers (activation, pooling, flatten, dropout, …), through autograd."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

# Nodes of autograd's graph that keep elements apart (and views, which keep their order)
_NAMES = [
    "Tanh", "Relu", "Sigmoid", "LogSigmoid", "Gelu", "Silu", "Mish", "Elu", "Celu", "LeakyRelu", "Softplus",
    "Hardtanh", "Hardswish", "Hardsigmoid", "Abs", "Exp", "Log", "Sin", "Cos", "Sqrt", "Square", "Pow", "Neg",
    "Mul", "Add", "Sub", "Div", "Clamp", "Clone", "Alias", "View", "UnsafeView", "ReshapeAlias", "ToCopy",
    "NativeDropout"
]  # fmt: skip
_ELEMENTWISE = {f"{name}Backward0" for name in _NAMES} | {"torch::autograd::AccumulateGrad"}


class Pullback(Protocol):
    """V in front of what stands between two layers, given V behind it."""

    def pull(self, V_x: Tensor, V_xx: Tensor, order: int) -> tuple[Tensor, Tensor]: ...

    def pull_rows(self, V_x: Tensor, Z: Tensor) -> tuple[Tensor, Tensor]: ...


class Segment:
    """sigma: leaf -> target, both with the batch first and samples independent of each other."""

    def __init__(self, leaf: Tensor, target: Tensor, slope: Tensor | None = None) -> None:
        self.leaf, self.target = leaf, target
        self.slope = slope  # sigma' of each element, where elements are kept apart

    @classmethod
    def chain(cls, leaves: list[Tensor], targets: list[Tensor], order: int) -> list[Segment]:
        """All segments of a chain, with their slopes: no segment reaches into another, so that one sweep finds all."""
        pairs = list(zip(leaves, targets, strict=True))
        apart = [(leaf, target) for leaf, target in pairs if _elementwise(leaf, target)]
        slopes: dict[int, Tensor] = {}
        if apart:
            ones = [torch.ones_like(target) for _, target in apart]
            # sigma' is kept with its own graph for the second derivative
            found = torch.autograd.grad(
                [t for _, t in apart], [leaf for leaf, _ in apart], ones, create_graph=order == 2, retain_graph=True
            )
            slopes = {id(leaf): slope for (leaf, _), slope in zip(apart, found, strict=True)}
        return [cls(leaf, target, slopes.get(id(leaf))) for leaf, target in pairs]

    def pull(self, V_x: Tensor, V_xx: Tensor, order: int) -> tuple[Tensor, Tensor]:
        """V_h = sigma_h' V_x and V_hh = sigma_h' V_xx sigma_h (+ V_x . sigma_hh for order 2), flat."""
        if self.slope is not None:
            return self._pull_diagonal(self.slope, V_x, V_xx, order)
        leaf, target = self.leaf, self.target
        B = len(leaf)
        V_h = self._vjp(V_x.view_as(target), create_graph=order == 2)
        rows = self._vjp_rows(target, V_xx)  # (B, n_x, n_h): V_xx sigma_h
        V_hh = self._vjp_rows(target, rows.mT)  # (B, n_h, n_h)
        if order == 2 and V_h.requires_grad:
            n = leaf[0].numel()
            basis = torch.eye(n, dtype=leaf.dtype, device=leaf.device).expand(B, n, n)
            V_hh = V_hh + self._vjp_rows(V_h, basis)
        return V_h.detach().flatten(1).to(V_x.dtype), V_hh.to(V_x.dtype)  # autocast has made the graph smaller

    def pull_rows(self, V_x: Tensor, Z: Tensor) -> tuple[Tensor, Tensor]:
        """V_h = sigma_h' V_x, and the rows Z (B, r, n_x) of a factor of V_xx likewise, flat."""
        if self.slope is not None:
            slope = self.slope.detach().flatten(1).to(V_x.dtype)
            return slope * V_x, slope[:, None] * Z
        rows = self._vjp_rows(self.target, torch.cat([V_x[:, None], Z], dim=1))
        rows = rows.to(V_x.dtype)  # autocast has made the graph smaller
        return rows[:, 0], rows[:, 1:]

    def _vjp(self, cotangent: Tensor, create_graph: bool) -> Tensor:
        return torch.autograd.grad(self.target, self.leaf, cotangent, retain_graph=True, create_graph=create_graph)[0]

    def _vjp_rows(self, target: Tensor, V: Tensor) -> Tensor:
        """J' applied to each row: (B, k, n_target) -> (B, k, n_leaf)."""
        cotangents = V.transpose(0, 1).reshape(V.shape[1], *target.shape)
        rows = torch.autograd.grad(
            target, self.leaf, cotangents, retain_graph=True, is_grads_batched=True, materialize_grads=True
        )[0]
        return rows.flatten(2).transpose(0, 1)

    def _pull_diagonal(self, d: Tensor, V_x: Tensor, V_xx: Tensor, order: int) -> tuple[Tensor, Tensor]:
        slope = d.detach().flatten(1)
        V_hh = slope[:, :, None] * V_xx * slope[:, None, :]
        if order == 2 and d.requires_grad:
            bend = torch.autograd.grad(d, self.leaf, torch.ones_like(d), materialize_grads=True)[0]
            V_hh.diagonal(dim1=1, dim2=2).add_(V_x * bend.flatten(1))
        return slope * V_x, V_hh


def _elementwise(leaf: Tensor, target: Tensor) -> bool:
    if target[0].numel() != leaf[0].numel():
        return False
    todo: list[Any] = [target.grad_fn]
    while todo:
        node = todo.pop()
        if node is None:
            continue
        if node.name() not in _ELEMENTWISE:
            return False
        todo.extend(n for n, _ in node.next_functions)
    return True
