"""The operations between two layers (activation, pooling, flatten, dropout, …), differentiated by autograd."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

# Nodes of autograd's graph that act elementwise (and views, which keep the order)
_NAMES = [
    "Tanh", "Relu", "Sigmoid", "LogSigmoid", "Gelu", "Silu", "Mish", "Elu", "Celu", "LeakyRelu", "Softplus",
    "Hardtanh", "Hardswish", "Hardsigmoid", "Abs", "Exp", "Log", "Sin", "Cos", "Sqrt", "Square", "Pow", "Neg",
    "Mul", "Add", "Sub", "Div", "Clamp", "Clone", "Alias", "View", "UnsafeView", "ReshapeAlias", "ToCopy",
    "NativeDropout"
]  # fmt: skip
_ELEMENTWISE = {f"{name}Backward0" for name in _NAMES} | {"torch::autograd::AccumulateGrad"}


class Pullback(Protocol):
    """V at the output of a layer, given V at the input of the next."""

    def pull(self, V_x: Tensor, V_xx: Tensor, order: int) -> tuple[Tensor, Tensor]: ...

    def pull_rows(self, V_x: Tensor, Z: Tensor) -> tuple[Tensor, Tensor]: ...


class Segment:
    """sigma: leaf -> target, both with the batch first and samples independent of each other."""

    def __init__(self, leaf: Tensor, target: Tensor, derivative: Tensor | None = None) -> None:
        self.leaf, self.target = leaf, target
        self.derivative = derivative  # sigma' of each element, for elementwise segments

    @classmethod
    def chain(cls, leaves: list[Tensor], targets: list[Tensor], order: int) -> list[Segment]:
        """All segments of a chain. They are independent, so that one backward pass gives all derivatives."""
        pairs = list(zip(leaves, targets, strict=True))
        elementwise = [(leaf, target) for leaf, target in pairs if _elementwise(leaf, target)]
        derivatives: dict[int, Tensor] = {}
        if elementwise:
            ones = [torch.ones_like(target) for _, target in elementwise]
            # sigma' is kept with its own graph for the second derivative
            found = torch.autograd.grad(
                [t for _, t in elementwise],
                [leaf for leaf, _ in elementwise],
                ones,
                create_graph=order == 2,
                retain_graph=True,
            )
            derivatives = {id(leaf): derivative for (leaf, _), derivative in zip(elementwise, found, strict=True)}
        return [cls(leaf, target, derivatives.get(id(leaf))) for leaf, target in pairs]

    def pull(self, V_x: Tensor, V_xx: Tensor, order: int) -> tuple[Tensor, Tensor]:
        """V_h = sigma_h' V_x and V_hh = sigma_h' V_xx sigma_h (+ V_x . sigma_hh for order 2), flat."""
        if self.derivative is not None:
            return self._pull_diagonal(self.derivative, V_x, V_xx, order)
        leaf, target = self.leaf, self.target
        B = len(leaf)
        V_h = self._vjp(V_x.view_as(target), create_graph=order == 2)
        rows = self._vjp_rows(target, V_xx)  # (B, n_x, n_h): V_xx sigma_h
        V_hh = self._vjp_rows(target, rows.mT)  # (B, n_h, n_h)
        if order == 2 and V_h.requires_grad:
            n = leaf[0].numel()
            basis = torch.eye(n, dtype=leaf.dtype, device=leaf.device).expand(B, n, n)
            V_hh = V_hh + self._vjp_rows(V_h, basis)
        return V_h.detach().flatten(1).to(V_x.dtype), V_hh.to(V_x.dtype)  # the graph may be in half precision

    def pull_rows(self, V_x: Tensor, Z: Tensor) -> tuple[Tensor, Tensor]:
        """V_h = sigma_h' V_x, and the rows Z (B, r, n_x) of a factor of V_xx likewise, flat."""
        if self.derivative is not None:
            derivative = self.derivative.detach().flatten(1).to(V_x.dtype)
            return derivative * V_x, derivative[:, None] * Z
        rows = self._vjp_rows(self.target, torch.cat([V_x[:, None], Z], dim=1))
        rows = rows.to(V_x.dtype)  # the graph may be in half precision
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
        derivative = d.detach().flatten(1)
        V_hh = derivative[:, :, None] * V_xx * derivative[:, None, :]
        if order == 2 and d.requires_grad:
            second = torch.autograd.grad(d, self.leaf, torch.ones_like(d), materialize_grads=True)[0]
            V_hh.diagonal(dim1=1, dim2=2).add_(V_x * second.flatten(1))
        return derivative * V_x, V_hh


class JointSegment:
    """The operations between two layers for micro-batches, each with its own graph."""

    def __init__(self, segments: list[Segment]) -> None:
        self.segments = segments

    def pull(self, V_x: Tensor, V_xx: Tensor, order: int) -> tuple[Tensor, Tensor]:
        sizes = [len(s.leaf) for s in self.segments]
        some = zip(self.segments, V_x.split(sizes), V_xx.split(sizes), strict=True)
        V_h, V_hh = zip(*(segment.pull(v, vv, order) for segment, v, vv in some), strict=True)
        return torch.cat(V_h), torch.cat(V_hh)

    def pull_rows(self, V_x: Tensor, Z: Tensor) -> tuple[Tensor, Tensor]:
        sizes = [len(s.leaf) for s in self.segments]
        some = zip(self.segments, V_x.split(sizes), Z.split(sizes), strict=True)
        V_h, rows = zip(*(segment.pull_rows(v, z) for segment, v, z in some), strict=True)
        return torch.cat(V_h), torch.cat(rows)


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
