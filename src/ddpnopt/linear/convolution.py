"""`nn.Conv1d/2d/3d` as a linear map.

The uses of a convolution at several inputs of each sample (frames of a video, or several calls in one step) are further
places of it: x is then (B, uses, C, …), and h (B, uses, O, …).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from ddpnopt.linear.layer import Layer, Parts, extended

BLOCK = 8  # channels that torch's kernel for grouped convolutions processes at once
GROUPED_PAIRS = 4096  # of input and output channels, at most, of a convolution that is grouped
GROUPED_PLACES = 32  # pairs for each place at which a convolution with a stride is applied, at most
CACHED = 2**18  # numbers of patches that are copied at once, to stay in the cache
NARROW = 16  # columns of a product below which two matrices side by side take a quarter of the time of one
SEEN = 64  # places of a sample, about, at which the inputs of a kernel are looked at


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
    basis: Tensor | None = field(default=None, compare=False)  # of the kernel's places, where that is another one

    @property
    def output_dim(self) -> int:  # type: ignore[override]
        return 1 - len(self.weight_shape)

    @property
    def feature_dims(self) -> tuple[int | None, int | None]:  # type: ignore[override]
        return self.output_dim, self.output_dim

    def _single(self, a: Tensor) -> Tensor:
        """Each use as a sample of its own."""
        return a.flatten(0, 1) if a.dim() > len(self.weight_shape) else a

    @property
    def takes_any_size(self) -> bool:
        """Whether zeros behind the last places of the inputs are what the kernel finds there anyway."""
        return not self.pad_first or self.pad_mode == "constant"

    def together(self, uses: list[Tensor]) -> Tensor:
        """Those of several sizes with zeros behind the last places, whose gradients are zero."""
        found = [use if use.dim() > len(self.weight_shape) else use[:, None] for use in uses]
        return torch.cat([*extended(found, 2)], 1)

    def _padded(self, x: Tensor) -> Tensor:
        return F.pad(x, self.pad_first, mode=self.pad_mode) if self.pad_first else x

    @property
    def _no_output_padding(self) -> list[int]:
        return [0] * len(self.stride)

    @property
    def mixes_features(self) -> bool:
        return self.groups == 1

    @property
    def kernel_places(self) -> int:
        return prod(self.weight_shape[2:])

    def kernel_inputs(self, x: Tensor) -> Tensor:
        x, n = self._single(x), len(self.stride)
        # a grid of places: all samples count alike, and the more of them the more places
        apart = max(1, round((prod(x.shape[2:]) / prod(self.stride) / SEEN) ** (1 / n)))
        seen = replace(self, stride=tuple(apart * s for s in self.stride), basis=None).patches(x)
        return seen.unflatten(-1, (-1, self.kernel_places)).flatten(1, -2)

    def in_basis(self, basis: Tensor) -> Conv:
        return replace(self, basis=basis)

    def _to_basis(self, places: Tensor) -> Tensor:
        """Gradients by the weights, all places of the kernel in their last dimension: those by the combinations."""
        if self.basis is None:
            return places
        matrix, n = self.basis.T.to(places.dtype), self.kernel_places
        if n < NARROW and places.shape[-1] % (2 * n) == 0:
            matrix, n = torch.block_diag(matrix, matrix), 2 * n
        return (places.unflatten(-1, (-1, n)) @ matrix).flatten(-2)

    def _from_basis(self, weight: Tensor) -> Tensor:
        """The weights of a convolution."""
        if self.basis is None:
            return weight
        return (weight.flatten(2) @ self.basis.to(weight.dtype)).view(weight.shape)

    def apply(self, x: Tensor, u: Parts) -> Tensor:
        if x.dim() > len(self.weight_shape):
            return self.apply(x.flatten(0, 1), u).unflatten(0, x.shape[:2])
        bias = u[1] if len(u) > 1 else None
        return torch.convolution(
            self._padded(x), self._from_basis(u[0]), bias, self.stride, self.padding, self.dilation,
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
        weight = self._from_basis(weight)
        if v.dim() > len(self.weight_shape):
            single = torch.Size((x_shape[0] * x_shape[1], *x_shape[2:]))
            return replace(self, basis=None).input_grad(v.flatten(0, 1), weight, single).unflatten(0, x_shape[:2])
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
        x, v = self._single(x), self._single(v)
        grads = self._backward(v, self._padded(x), weight, [False, True, self.bias])
        found = self._to_basis(grads[1].flatten(1)).view(self.weight_shape) if self.basis is not None else grads[1]
        return [found, grads[2]] if self.bias else [found]

    def _all_padded(self, x: Tensor) -> Tensor:
        pads = [p for p in reversed(self.padding) for _ in range(2)]
        return F.pad(self._padded(x), pads) if any(pads) else self._padded(x)

    def sample_grads(self, x: Tensor, v: Tensor) -> Tensor:
        if x.dim() > len(self.weight_shape):
            return self.sample_grads(x.flatten(0, 1), v.flatten(0, 1)).unflatten(0, x.shape[:2]).sum(1)
        if self._is_pointwise():
            if v.stride(1) == 1 and x.stride(1) == 1:  # channels last in memory
                return torch.bmm(v.movedim(1, -1).flatten(1, -2).mT, x.movedim(1, -1).flatten(1, -2))[:, None]
            return torch.bmm(v.flatten(2), x.flatten(2).mT)[:, None]
        x = x.contiguous()  # what follows is so much slower with channels last that a copy pays
        if self._is_grouped_faster(x, v):
            return self._to_basis(self._as_groups(x, v.contiguous()))
        # the rows of one group are the places, wherever the channels are in memory
        return self._to_basis(self._over_columns(x, v if self.groups == 1 and v.stride(1) == 1 else v.contiguous()))

    def _over_columns(self, x: Tensor, v: Tensor) -> Tensor:
        """Through copies of all patches, a few samples at a time."""
        x, g, kernel = self._all_padded(x), self.groups, self.weight_shape[2:]
        (B, C), O, out = x.shape[:2], v.shape[1], v.shape[2:]
        J, P, steps = C // g * prod(kernel), prod(out), x.stride()[2:]
        within = [r * n for r, n in zip(self.dilation, steps, strict=True)]
        between = [s * n for s, n in zip(self.stride, steps, strict=True)]
        patches = x.as_strided((B, C, *kernel, *out), (*x.stride()[:2], *within, *between), x.storage_offset())
        v, found = v.reshape(B, g, O // g, P), x.new_empty(B, g, O // g, J)
        some = max(1, CACHED // max(1, g * J * P))
        for b in range(0, B, some):
            n = min(some, B - b)
            columns = patches[b : b + n].reshape(n * g, J, P)
            torch.bmm(v[b : b + n].flatten(0, 1), columns.mT, out=found[b : b + n].view(n * g, O // g, J))
        return found

    def _is_pointwise(self) -> bool:
        """Whether it is a linear layer at each pixel."""
        plain = self.groups == 1 and not self.pad_first and not any(self.padding)
        return plain and prod(self.weight_shape[2:]) == prod(self.stride) == 1

    def _is_grouped_faster(self, x: Tensor, v: Tensor) -> bool:
        """Whether torch's kernel for grouped convolutions is faster: measured with float32 on a CPU."""
        if x.dim() != 4 or x.dtype != torch.float32 or x.device.type != "cpu":
            return False
        if self.groups > 1:
            return self.groups == x.shape[1] == v.shape[1]  # one input channel for each output channel
        outputs, inputs = self.weight_shape[:2]
        if outputs % BLOCK or inputs % BLOCK:
            return False
        strided = any(s > 1 for s in self.stride)
        return outputs * inputs <= (GROUPED_PLACES * v[0, 0].numel() if strided else GROUPED_PAIRS)

    def _as_groups(self, x: Tensor, v: Tensor) -> Tensor:
        """One convolution in which every sample is a group of its own: the gradient of its weights is that we want."""
        B, (O, C), kernel, g = len(x), self.weight_shape[:2], self.weight_shape[2:], self.groups
        x = self._padded(x)
        found = torch.ops.aten.convolution_backward(
            v.reshape(1, B * O, *v.shape[2:]), x.reshape(1, B * g * C, *x.shape[2:]),
            v.new_empty(1).expand(B * O, C, *kernel), None, self.stride, self.padding, self.dilation,
            False, self._no_output_padding, B * g, [False, True, False],
        )  # fmt: skip
        weight: Tensor = found[1]
        return weight.reshape(B, g, O // g, -1)

    def patches(self, x: Tensor) -> Tensor:
        if x.dim() > len(self.weight_shape):
            return self.patches(x.flatten(0, 1)).unflatten(0, x.shape[:2]).flatten(1, 2)
        kernel = self.weight_shape[2:]
        x = self._all_padded(x)
        for d, (k, s, r) in enumerate(zip(kernel, self.stride, self.dilation, strict=True)):
            x = x.unfold(d + 2, r * (k - 1) + 1, s)[..., ::r]
        # (B, C, out…, kernel…) -> (B, P, g, C/g * kernel)
        n = len(kernel)
        B, C, places = x.shape[0], x.shape[1], prod(x.shape[2 : 2 + n])
        x = x.reshape(B, self.groups, C // self.groups, places, prod(kernel))
        return self._to_basis(x.permute(0, 3, 1, 2, 4).flatten(3))

    def rows(self, h: Tensor) -> Tensor:
        if h.dim() > len(self.weight_shape):
            return self.rows(h.flatten(0, 1)).unflatten(0, h.shape[:2]).flatten(1, 2)
        B, O = h.shape[:2]
        return h.reshape(B, self.groups, O // self.groups, -1).permute(0, 3, 1, 2)

    def unrows(self, rows: Tensor) -> Tensor:
        return rows.permute(0, 2, 3, 1).flatten(1)
