"""What a layer knows: the affine map h = g(x, u) of eq. 6 and the products with its Jacobians.

Nothing here knows `nn.Module`, gradients of a loss or curvature. A vector in a layer's parameter space is a list
`Parts`: [W] or [W, b], each shaped like the parameter. Where one matrix is handier, `join` gives the *joint form*

    U: (g, O, J)      g groups, O outputs a group, J = inputs a group x kernel (+ 1 for the bias, last)

and inputs and outputs have the *column form*, one row for each place at which the weights are applied:

    patches(x): (B, P, g, J)        rows(h): (B, P, g, O)        h = patches . U' at each place and group

P is 1 for `nn.Linear` on (B, n) inputs, the number of tokens on (B, tokens, n), of output pixels for a convolution.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

Parts = list[Tensor]

WINDOWS = 100_000  # numbers of a sample's input up to which all places of a kernel are taken together
DOTTED = 2**19  # numbers of each factor that are multiplied at once in inner products
CACHED = 600_000  # numbers of inputs and slopes worked on at once, to stay in the cache


def per_sample_dot(a: Tensor, b: Tensor, less: Tensor | None = None) -> Tensor:
    """<a_i, b_i - less_i> for each sample i: (B, …), … -> (B,)."""
    if a.numel() >= 2 * DOTTED:  # some samples at a time: what is formed on the way stays in the cache
        n = max(1, len(a) * DOTTED // a.numel())
        parts = [a.split(n), b.split(n), [None] * -(-len(a) // n) if less is None else less.split(n)]
        return torch.cat([per_sample_dot(*some) for some in zip(*parts, strict=True)])
    if less is not None:
        b = b - less
    return torch.linalg.vecdot(a, b) if a.dim() == 2 else torch.linalg.vecdot(a.flatten(1), b.flatten(1))


def scale_samples(w: Tensor, a: Tensor) -> Tensor:
    """w_i a_i: (B,), (B, …) -> (B, …)."""
    return w.to(a.dtype).view(-1, *[1] * (a.dim() - 1)) * a


def _room(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Room for this shape, (B, channels, …), with the channels last in memory where they are so in `like`."""
    if like.stride(1) < like.stride(-1):
        return like.new_empty(shape[0], *shape[2:], shape[1]).movedim(-1, 1)
    return like.new_empty(shape)


class Layer(ABC):
    """An affine layer, bilinear in its input and its parameters, so that g_xx = g_uu = 0."""

    bias: bool
    groups: int
    weight_shape: tuple[int, ...]
    output_dim: ClassVar[int] = 1  # of h

    @abstractmethod
    def apply(self, x: Tensor, u: Parts) -> Tensor:
        """g(x, u), linear in u; with u = [W] also linear in x, so it serves as g_x dx."""

    @abstractmethod
    def input_grad(self, v: Tensor, weight: Tensor, x_shape: torch.Size) -> Tensor:
        """g_x' v: v like h -> like x."""

    @abstractmethod
    def grad(self, x: Tensor, v: Tensor) -> Parts:
        """sum_i g_u' v_i: the weight gradient with output gradients v."""

    @abstractmethod
    def patches(self, x: Tensor) -> Tensor:
        """Column form of the input without the bias column: (B, P, g, J0)."""

    @abstractmethod
    def rows(self, h: Tensor) -> Tensor:
        """Column form of an output-shaped tensor: (B, P, g, O)."""

    @abstractmethod
    def unrows(self, rows: Tensor) -> Tensor:
        """Back from the column form to (B, n_h), in the memory order of h."""

    def sample_grads(self, x: Tensor, v: Tensor) -> Tensor:
        """g_u' v_i of each sample, without the bias: (B, g, O, J0)."""
        return torch.einsum("bpgo,bpgj->bgoj", self.rows(v), self.patches(x))

    def narrow(self, v: Tensor, start: int, rows: int) -> tuple[Layer, Tensor]:
        """Some of the outputs alone: the layer that has them, which must be without groups, and their part of v."""
        part = copy(self)
        object.__setattr__(part, "weight_shape", (rows, *self.weight_shape[1:]))
        return part, v.narrow(self.output_dim, start, rows)

    @property
    def joint_shape(self) -> tuple[int, int, int]:
        """(g, O, J) of the joint form."""
        out, rest = self.weight_shape[0], prod(self.weight_shape[1:])
        return self.groups, out // self.groups, rest + self.bias

    def augmented(self, x: Tensor) -> Tensor:
        """x~: the patches with the bias column: (B, P, g, J)."""
        columns = self.patches(x)
        return F.pad(columns, (0, 1), value=1.0) if self.bias else columns

    def join(self, u: Parts) -> Tensor:
        """[W, b] -> (g, O, J); also with leading dimensions before those of the parameters."""
        weight = u[0]
        if weight.dim() == 2:  # a linear layer's own: little to do
            return (torch.cat([weight, u[1][:, None]], 1) if self.bias else weight)[None]
        lead = weight.shape[: weight.dim() - len(self.weight_shape)]
        joint = weight.reshape(*lead, *self.joint_shape[:2], -1)
        if self.bias:
            joint = torch.cat([joint, u[1].reshape(*lead, self.groups, -1, 1)], dim=-1)
        return joint

    def split(self, joint: Tensor) -> Parts:
        """(g, O, J) -> [W, b]."""
        if joint.dim() == 3 and len(self.weight_shape) == 2:
            return [joint[0, :, :-1], joint[0, :, -1]] if self.bias else [joint[0]]
        lead = joint.shape[:-3]
        if not self.bias:
            return [joint.reshape(*lead, *self.weight_shape)]
        return [
            joint[..., :-1].reshape(*lead, *self.weight_shape),
            joint[..., -1].reshape(*lead, self.weight_shape[0]),
        ]


@dataclass(frozen=True)
class Linear(Layer):
    """`nn.Linear`: h = W x + b on the last dimension, whatever stands between it and the batch."""

    weight_shape: tuple[int, ...]
    bias: bool
    groups: int = 1
    output_dim: ClassVar[int] = -1

    def apply(self, x: Tensor, u: Parts) -> Tensor:
        return F.linear(x, *u)

    def input_grad(self, v: Tensor, weight: Tensor, x_shape: torch.Size) -> Tensor:
        return v @ weight

    def grad(self, x: Tensor, v: Tensor) -> Parts:
        x, v = x.reshape(-1, x.shape[-1]), v.reshape(-1, v.shape[-1])
        return [v.T @ x, v.sum(0)] if self.bias else [v.T @ x]

    def patches(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], -1, 1, x.shape[-1])

    def rows(self, h: Tensor) -> Tensor:
        return h.reshape(h.shape[0], -1, 1, h.shape[-1])

    def unrows(self, rows: Tensor) -> Tensor:
        return rows.flatten(1)


@dataclass(frozen=True)
class Conv(Layer):
    """`nn.Conv1d/2d/3d` with stride, padding of every mode, dilation and groups."""

    weight_shape: tuple[int, ...]
    bias: bool
    groups: int
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...]  # zeros at both ends, handed to the convolution
    pad_first: tuple[int, ...] = ()  # in F.pad's order, where zeros at both ends do not say it
    pad_mode: str = "constant"

    def _padded(self, x: Tensor) -> Tensor:
        return F.pad(x, self.pad_first, mode=self.pad_mode) if self.pad_first else x

    @property
    def _no_output_padding(self) -> list[int]:
        return [0] * len(self.stride)

    def apply(self, x: Tensor, u: Parts) -> Tensor:
        bias = u[1] if len(u) > 1 else None
        return torch.convolution(
            self._padded(x), u[0], bias, self.stride, self.padding, self.dilation,
            False, self._no_output_padding, self.groups,
        )  # fmt: skip

    def _backward(self, v: Tensor, x: Tensor, weight: Tensor, mask: list[bool]) -> tuple[Tensor, ...]:
        bias_size = [self.weight_shape[0]] if mask[2] else None
        grads: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
            v, x, weight, bias_size, self.stride, self.padding, self.dilation,
            False, self._no_output_padding, self.groups, mask,
        )  # fmt: skip
        return grads

    def input_grad(self, v: Tensor, weight: Tensor, x_shape: torch.Size) -> Tensor:
        if not self.pad_first:
            x = v.new_empty(1).expand(x_shape)  # only its shape is used
            return self._backward(v, x, weight, [True, False, False])[0]
        with torch.enable_grad():  # the adjoint of F.pad, whatever its mode
            x = v.new_zeros(x_shape, requires_grad=True)
            padded = self._padded(x)
            inner = self._backward(v, padded.detach(), weight, [True, False, False])[0]
            return torch.autograd.grad(padded, x, inner)[0]

    def grad(self, x: Tensor, v: Tensor) -> Parts:
        weight = v.new_empty(1).expand(self.weight_shape)  # only its shape is used
        grads = self._backward(v, self._padded(x), weight, [False, True, self.bias])
        return [grads[1], grads[2]] if self.bias else [grads[1]]

    def _all_padded(self, x: Tensor) -> Tensor:
        pads = [p for p in reversed(self.padding) for _ in range(2)]
        return F.pad(self._padded(x), pads) if any(pads) else self._padded(x)

    def sample_grads(self, x: Tensor, v: Tensor) -> Tensor:
        if any(s > 1 for s in self.stride):
            return super().sample_grads(x, v)
        # With unit stride the patches need not all be written out: lay v out on the grid of the padded input, and each
        # place of the kernel is one batched matrix product with the input, read from an offset. Some places side by
        # side make the products larger, and some samples at a time leave all of it in the cache.
        x, kernel, g = self._padded(x), self.weight_shape[2:], self.groups
        B, C, O, K = len(x), x.shape[1] // g, v.shape[1] // g, prod(kernel)
        grid = [n + 2 * p for n, p in zip(x.shape[2:], self.padding, strict=True)]
        steps = [prod(grid[d + 1 :]) for d in range(len(grid))]  # of the flat padded input
        places = [
            sum(k * r * s for k, r, s in zip(place, self.dilation, steps, strict=True))
            for place in product(*map(range, kernel))
        ]
        together = K if C * K * prod(grid) <= WINDOWS else kernel[-1]
        starts, shifts = places[::together], places[:together]
        length = 1 + sum((n - 1) * s for n, s in zip(v.shape[2:], steps, strict=True))  # from first to last place of v
        width = prod(grid) - shifts[-1]
        some = min(B, max(1, CACHED // (x.shape[1] + v.shape[1]) // prod(grid)))

        inputs, slopes = _room(x, (some, g * C, *grid)).zero_(), _room(v, (some, g * O, *grid)).zero_()
        inside = [slice(p, p + n) for p, n in zip(self.padding, x.shape[2:], strict=True)]
        corner = [slice(n) for n in v.shape[2:]]
        windows = _room(x, (some * g, together * C, width))
        products = x.new_empty(len(starts), some * g, O, together * C)
        out = x.new_empty(B, g, O, C, len(starts), together)
        for b in range(0, B, some):
            n = min(some, B - b)
            inputs[(slice(n), slice(None), *inside)] = x[b : b + n]
            slopes[(slice(n), slice(None), *corner)] = v[b : b + n]
            flat = inputs[:n].flatten(2).reshape(n * g, C, -1)
            for j, shift in enumerate(shifts):
                windows[: n * g, j * C : (j + 1) * C] = flat[:, :, shift : shift + width]
            left, right = slopes[:n].flatten(2).reshape(n * g, O, -1)[:, :, :length], windows[: n * g]
            for i, start in enumerate(starts):
                torch.bmm(left, right[:, :, start : start + length].mT, out=products[i, : n * g])
            found = products[:, : n * g].view(len(starts), n, g, O, together, C)
            out[b : b + n] = found.permute(1, 2, 3, 5, 0, 4)
        return out.view(B, g, O, -1)

    def patches(self, x: Tensor) -> Tensor:
        kernel = self.weight_shape[2:]
        x = self._all_padded(x)
        for d, (k, s, r) in enumerate(zip(kernel, self.stride, self.dilation, strict=True)):
            x = x.unfold(d + 2, r * (k - 1) + 1, s)[..., ::r]
        # (B, C, out…, kernel…) -> (B, P, g, C/g * kernel)
        n = len(kernel)
        B, C, places = x.shape[0], x.shape[1], prod(x.shape[2 : 2 + n])
        x = x.reshape(B, self.groups, C // self.groups, places, prod(kernel))
        return x.permute(0, 3, 1, 2, 4).flatten(3)

    def rows(self, h: Tensor) -> Tensor:
        B, O = h.shape[:2]
        return h.reshape(B, self.groups, O // self.groups, -1).permute(0, 3, 1, 2)

    def unrows(self, rows: Tensor) -> Tensor:
        return rows.permute(0, 2, 3, 1).flatten(1)
