"""What a layer knows: the affine map h = g(x, u) of eq. 6 and the products with its Jacobians.

Nothing here knows `nn.Module`, gradients of a loss or curvature. A vector in a layer's parameter space is a list
`Parts`: [W] or [W, b], each shaped like the parameter. Where one matrix is handier, `join` gives the *joint form*

    U: (g, O, J)      g groups, O outputs per group, J = inputs per group x kernel (+ 1 for the bias, last)

and inputs and outputs have the *column form*, one row for each place at which the weights are applied:

    patches(x): (B, P, g, J)        rows(h): (B, P, g, O)        h = patches . U' at each place and group

P is 1 for `nn.Linear` on (B, n) inputs, the number of tokens on (B, tokens, n), of output pixels for a convolution.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from math import prod
from typing import TYPE_CHECKING, ClassVar, overload

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from ddpnopt.linear.sample_gradients import ByPlaces, Explicit, SampleGradients

Parts = list[Tensor]
STRIPS = 4  # of a symmetric product: they save three eighths of the multiplications
STRIPPED_ROWS, STRIPPED_NUMBERS = 64, 2**17  # with fewer they take longer than the work they save
FEW = 32  # rows of a matrix that is multiplied with itself sooner than with many vectors
SMALLEST, LARGEST = 1e-12, 1e12  # numbers whose squares, and sums of them, are numbers of single precision
DOTTED = 2**19  # numbers of each factor that are multiplied at once in inner products


def add(a: Parts, b: Parts | None) -> Parts:
    """a + b; None is zero."""
    return a if b is None else [p + q for p, q in zip(a, b, strict=True)]


def inner(a: Parts, b: Parts) -> Tensor:
    """<a, b>, a scalar."""
    return torch.stack([torch.vdot(p.flatten(), q.flatten()) for p, q in zip(a, b, strict=True)]).sum()


def norm(parts: Parts) -> float:
    """The Euclidean norm of all parts together."""
    return float(torch.stack([p.square().sum() for p in parts]).sum().sqrt())


def symmetric_product(a: Tensor, b: Tensor) -> Tensor:
    """a b', where it is known to be symmetric: of large ones strips from the diagonal on, whose mirror is copied."""
    B = len(a)
    if B < STRIPPED_ROWS or a.numel() < STRIPPED_NUMBERS:
        return F.linear(a, b)
    found, n = a.new_empty(B, B), -(-B // STRIPS)
    for i in range(0, B, n):
        torch.mm(a[i : i + n], b[i:].T, out=found[i : i + n, i:])
        found[i + n :, i : i + n] = found[i : i + n, i + n :].T
    return found


def scale_samples(w: Tensor, a: Tensor) -> Tensor:
    """w_i a_i: (B,), (B, …) -> (B, …)."""
    w = in_precision(w, a.dtype)
    return (w[:, None] if a.dim() == 2 else w.view(-1, *[1] * (a.dim() - 1))) * a


@overload
def in_precision(tensor: Tensor, dtype: torch.dtype) -> Tensor: ...


@overload
def in_precision(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None: ...


def in_precision(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """`to(dtype)`, which takes a microsecond even where there is nothing to do."""
    return tensor if tensor is None or tensor.dtype == dtype else tensor.to(dtype)


def per_sample_dot(a: Tensor, b: Tensor, less: Tensor | None = None) -> Tensor:
    """<a_i, b_i - less_i> for each sample i: (B, …), … -> (B,)."""
    if a.numel() >= 2 * DOTTED:  # a few samples at a time, so that temporary tensors stay in the cache
        n = max(1, len(a) * DOTTED // a.numel())
        parts = [a.split(n), b.split(n), [None] * -(-len(a) // n) if less is None else less.split(n)]
        return torch.cat([per_sample_dot(*some) for some in zip(*parts, strict=True)])
    if less is not None:
        b = b - less
    if a.dim() == 2:
        return torch.linalg.vecdot(a, b)
    if a.stride(1) == 1 and b.stride(1) == 1 and a.dim() > 3:  # channels last in memory: flat without a copy
        a, b = a.movedim(1, -1), b.movedim(1, -1)
    return torch.linalg.vecdot(a.flatten(1), b.flatten(1))


class Layer(ABC):
    """An affine layer, bilinear in its input and its parameters, so that g_xx = g_uu = 0."""

    bias: bool
    groups: int
    weight_shape: tuple[int, ...]
    output_dim: ClassVar[int] = 1  # of h
    feature_dims: ClassVar[tuple[int | None, int | None]] = (1, 1)  # of x and h, where each may have its own scale

    weight_dims: ClassVar[tuple[int, int]] = (1, 0)  # of the weight: those of inputs and of outputs

    @property
    def mixes_features(self) -> bool:
        """Whether all outputs depend on all input features, so that these may be mixed."""
        return False

    @property
    def kernel_places(self) -> int:
        """Places of a kernel, whose weights are the last dimensions of the weight."""
        return 1

    def kernel_inputs(self, x: Tensor) -> Tensor:
        """What the kernel sees of each input feature, at some places: (B, …, kernel places)."""
        raise TypeError(f"{type(self).__name__} has no kernel")

    def in_basis(self, basis: Tensor) -> Layer:
        """The layer whose weights are those of combinations of the kernel's places, the rows of `basis`."""
        raise TypeError(f"{type(self).__name__} has no kernel")

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

    def sample_gradients(
        self, x: Tensor, p: Tensor, *, others: int = 1, recompute: bool | None = None
    ) -> SampleGradients:
        """P_u for inputs x and output gradients p, in the cheapest form; `others`: how many each is multiplied with.

        `recompute` asks for a form that stores nothing but x and p; by default where the gradients would need more
        memory than x and p. This is the general form, for weights that act at several places of each sample.
        """
        form = self.form_over_places(x, p, others, recompute)
        assert form is not None
        return form(self, x, p)

    def form_over_places(
        self, x: Tensor, p: Tensor, others: int, recompute: bool | None
    ) -> type[Explicit] | type[ByPlaces] | None:
        """The form of `sample_gradients` if it is one for several places; None for any other."""
        from ddpnopt.linear.sample_gradients import form_over_places  # which needs this class

        return form_over_places(self, x, p, others, recompute)

    def outer_factors(self, xi: Tensor | None, psi: Tensor | None) -> Parts:
        """psi (x) xi for [W] or [W, b], broadcast: factors of the input features and of the outputs."""
        assert xi is not None
        assert psi is not None
        trailing = [1] * (len(self.weight_shape) - 2)
        of_groups = psi.view(self.groups, -1, 1) * xi.view(self.groups, 1, -1)
        weight = of_groups.view(self.weight_shape[0], -1, *trailing)
        return [weight, psi] if self.bias else [weight]

    def sample_grads(self, x: Tensor, v: Tensor) -> Tensor:
        """g_u' v_i of each sample, without the bias: (B, g, O, J0)."""
        return torch.einsum("bpgo,bpgj->bgoj", self.rows(v), self.patches(x))

    def narrow(self, v: Tensor, start: int, rows: int) -> tuple[Layer, Tensor]:
        """Some of the outputs alone: the layer that has them, which must be without groups, and their part of v."""
        part = copy(self)
        object.__setattr__(part, "weight_shape", (rows, *self.weight_shape[1:]))
        return part, v.narrow(self.output_dim, start, rows)

    def together(self, uses: list[Tensor]) -> Tensor:
        """Inputs, or outputs, of several uses of the layer in one pass as further places: (B, …) each -> (B, …)."""
        raise TypeError(f"the uses of {type(self).__name__} in one pass are different stages")

    @property
    def bias_shape(self) -> tuple[int, ...]:
        return self.weight_shape[:1]

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
        if weight.dim() == 2:  # of a linear layer: little to do
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


def spectral_norm(a: Tensor, size: float = 0.0, rounds: int = 4) -> float:
    """The largest singular value of a matrix by power iteration, from below: within a few percent.

    `size` is the Frobenius norm, where it is known.
    """
    a = a if a.dtype.itemsize >= 4 else a.float()
    if min(a.shape) <= FEW and SMALLEST < size < LARGEST and not a.is_complex():
        return size * _largest(a if a.shape[0] <= a.shape[1] else a.T, size)
    v = a[int(torch.linalg.vector_norm(a, dim=1).argmax())].conj()
    for _ in range(rounds):
        u = a @ (v / torch.linalg.vector_norm(v))
        v = a.mH @ (u / torch.linalg.vector_norm(u))  # of the size of a: its square may be too large for a number
    return float(torch.linalg.vector_norm(v))


def _largest(a: Tensor, size: float) -> float:
    """The same relative to `size` for a few rows, in few calls: from the 16th power of a a'."""
    products = torch.addmm(a.new_zeros(()), a, a.T, beta=0, alpha=size**-2)  # with trace 1
    power = torch.mm(products, products)
    power = torch.mm(power, power)
    power = torch.mm(power, power)
    flat = power.view(-1)
    square, next_square = float(flat.dot(flat)), float(flat.dot(torch.mm(power, products).view(-1)))
    return (next_square / square) ** 0.5 if square > 0 else 1.0


def extended(tensors: Sequence[Tensor], start: int) -> Sequence[Tensor]:
    """All of one size from dimension `start` on, with zeros behind the last numbers of the smaller ones."""
    if len({t.shape[start:] for t in tensors}) == 1:
        return tensors
    sizes = [max(each) for each in zip(*(t.shape[start:] for t in tensors), strict=True)]
    missing = [[n - m for n, m in zip(sizes, t.shape[start:], strict=True)] for t in tensors]
    return [
        F.pad(t, [n for behind in reversed(each) for n in (0, behind)]) if any(each) else t
        for t, each in zip(tensors, missing, strict=True)
    ]


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """One tensor, in the widest precision."""
    if len({t.dtype for t in tensors}) > 1:
        tensors = [t.double() for t in tensors]
    return torch.stack(list(tensors))
