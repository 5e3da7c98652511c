"""Random small networks for hypothesis: chains and graphs of layers, and inputs that fit them.

Shapes are those of one sample: (n,) vectors, (tokens, n), (channels, length…) for 1 to 3 dimensions of space.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

Draw = Callable[[st.SearchStrategy[Any]], Any]
Shape = tuple[int, ...]
CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
AVERAGE = {1: nn.AvgPool1d, 2: nn.AvgPool2d, 3: nn.AvgPool3d}
MAXIMUM = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}
BATCH_NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
SMOOTH = [nn.Tanh, nn.Sigmoid, nn.Softplus, nn.GELU, nn.SiLU]
KINKED = [nn.ReLU, nn.LeakyReLU, nn.ELU, nn.Hardtanh]
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
MOST = 48  # numbers in the state of one sample
IDS = 5  # words of an embedding


@dataclass(frozen=True)
class Case:
    """A network and what it is fed with."""

    model: nn.Module
    kind: str  # of the input: "vector", "tokens", "space" or "ids"
    shape: Shape  # of one sample of the input
    classes: int
    places: Shape  # what stands between the batch and the classes in the outputs
    outputs: int
    seed: int

    def batch(self, size: int, step: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        g = torch.Generator().manual_seed(1000 * self.seed + step)
        y = torch.randint(self.classes, (size, *self.places), generator=g)
        if self.kind == "ids":
            return torch.randint(IDS, (size, *self.shape), generator=g), y
        return torch.randn(size, *self.shape, generator=g, dtype=torch.float64).to(dtype), y


class Residual(nn.Module):
    """x + inner(x), the sum in place or not, or x * sigmoid(inner(x))."""

    def __init__(self, inner: nn.Module, how: str) -> None:
        super().__init__()
        self.inner, self.how = inner, how

    def extra_repr(self) -> str:
        return repr(self.how)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "gate":
            return x * torch.sigmoid(self.inner(x))
        return self.inner(x).add_(x) if self.how == "in place" else x + self.inner(x)


class Branches(nn.Module):
    """Two ways side by side, joined behind each other."""

    def __init__(self, a: nn.Module, b: nn.Module) -> None:
        super().__init__()
        self.a, self.b = a, b

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.a(x).flatten(1), self.b(x).flatten(1)], 1)


class Heads(nn.Module):
    """Several outputs of the same features, as a tuple."""

    def __init__(self, body: nn.Module, heads: list[nn.Module]) -> None:
        super().__init__()
        self.body, self.heads = body, nn.ModuleList(heads)

    def forward(self, x: Tensor) -> Any:
        x = self.body(x)
        return tuple(head(x) for head in self.heads)


class SelfAttention(nn.Module):
    """One head, written out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.q(x) @ self.k(x).mT, -1) @ self.v(x)


class FusedAttention(nn.Module):
    """PyTorch's own, which calls none of its projections as modules."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


def start(draw: Draw, kinds: list[str]) -> tuple[str, Shape]:
    """What kind of input, and its shape."""
    kind = draw(st.sampled_from(kinds))
    size = st.integers(1, 4)
    if kind == "vector":
        return kind, (draw(st.integers(1, 6)),)
    if kind == "tokens":
        return kind, (draw(size), draw(size))
    if kind == "ids":
        return kind, (draw(size),)
    dims = draw(st.integers(1, 3))
    longest = {1: 7, 2: 4, 3: 2}[dims]
    return kind, (draw(st.integers(1, 3)), *[draw(st.integers(1, longest)) for _ in range(dims)])


def layer(draw: Draw, kind: str, shape: Shape) -> nn.Module:
    """An affine layer with whatever options fit."""
    bias = draw(st.booleans())
    if kind != "space":
        return nn.Linear(shape[-1], draw(st.integers(1, 5)), bias=bias)
    channels, space = shape[0], shape[1:]
    groups = draw(st.sampled_from([g for g in range(1, channels + 1) if channels % g == 0]))
    out = groups * draw(st.integers(1, max(1, 4 // groups)))
    kernel, stride, padding, dilation = [], [], [], []
    for n in space:
        pad = draw(st.integers(0, 2))
        k = draw(st.integers(1, min(3, n + 2 * pad)))
        most = (n + 2 * pad - 1) // (k - 1) if k > 1 else 3
        kernel.append(k)
        dilation.append(draw(st.integers(1, min(2, most))))
        stride.append(draw(st.integers(1, 3)))
        padding.append(pad)
    modes = ["zeros"]
    if all(0 < p < n for p, n in zip(padding, space, strict=True)):
        modes = ["zeros", "reflect", "replicate", "circular"]
    mode = draw(st.sampled_from(modes))
    if mode == "zeros" and all(s == 1 for s in stride) and draw(st.integers(0, 3)) == 0:
        padding = "same"
    made = CONVS[len(space)](
        channels, out, kernel, stride, padding, dilation, groups, bias=bias, padding_mode=mode
    )  # fmt: skip
    return made


def activation(draw: Draw, behind: nn.Module | None = None) -> nn.Module:
    """In place only behind a layer: autograd itself wants the outputs of most other modules."""
    made = draw(st.sampled_from(SMOOTH + KINKED))
    in_place = made in KINKED and isinstance(behind, LAYERS) and draw(st.booleans())
    return made(inplace=True) if in_place else made()


def pool(draw: Draw, shape: Shape) -> nn.Module:
    dims = len(shape) - 1
    kind = draw(st.sampled_from(["average", "maximum", "adaptive"]))
    if kind == "adaptive":
        made = {1: nn.AdaptiveAvgPool1d, 2: nn.AdaptiveAvgPool2d, 3: nn.AdaptiveAvgPool3d}[dims]
        return made(tuple(draw(st.integers(1, n)) for n in shape[1:]))
    kernel = tuple(draw(st.integers(1, min(2, n))) for n in shape[1:])
    return (AVERAGE if kind == "average" else MAXIMUM)[dims](kernel, draw(st.integers(1, 2)))


def dropout(draw: Draw, kind: str, shape: Shape) -> nn.Module:
    p = draw(st.sampled_from([0.1, 0.5]))
    spatial = {1: nn.Dropout1d, 2: nn.Dropout2d, 3: nn.Dropout3d}
    return spatial[len(shape) - 1](p) if kind == "space" and draw(st.booleans()) else nn.Dropout(p)


def norm(draw: Draw, kind: str, shape: Shape) -> nn.Module:
    """Batch norm couples the samples."""
    if kind != "space":
        batch = kind == "vector" and draw(st.booleans())
        return nn.BatchNorm1d(shape[0]) if batch else nn.LayerNorm(shape[-1])
    choice = draw(st.sampled_from(["batch", "group", "layer"]))
    if choice == "layer":
        return nn.LayerNorm(shape)
    if choice == "batch":
        return BATCH_NORMS[len(shape) - 1](shape[0])
    return nn.GroupNorm(draw(st.sampled_from([g for g in range(1, shape[0] + 1) if shape[0] % g == 0])), shape[0])


def keeper(draw: Draw, kind: str, shape: Shape) -> nn.Module:
    """Something with layers inside that gives back the shape that it gets: a residual sum, attention."""
    choice = draw(st.sampled_from(["residual", "residual", "attention"] if kind == "tokens" else ["residual"]))
    if choice == "attention":
        if draw(st.booleans()):
            return SelfAttention(shape[-1])
        return FusedAttention(shape[-1])
    how = draw(st.sampled_from(["sum", "in place", "gate"]))
    if kind == "space":
        size = draw(st.sampled_from([1, 3]))
        inner: list[nn.Module] = [CONVS[len(shape) - 1](shape[0], shape[0], size, padding=size // 2)]
    else:
        width = draw(st.integers(1, 4))
        first = nn.Linear(shape[-1], width)
        inner = [first, activation(draw, first), nn.Linear(width, shape[-1])]
    if draw(st.booleans()):
        inner.insert(0, nn.Tanh())
    return Residual(nn.Sequential(*inner), how)


def after(module: nn.Module, shape: Shape, *, ids: bool = False) -> Shape:
    """The shape behind a module."""
    x = torch.zeros(2, *shape, dtype=torch.long) if ids else torch.zeros(2, *shape)
    with torch.no_grad():
        return tuple(module(x).shape[1:])


def body(draw: Draw, kind: str, shape: Shape, length: int, *, graph: bool) -> tuple[list[nn.Module], Shape]:
    """Layers with activations and pooling between them; in a graph also norms, dropout, sums and attention."""
    modules: list[nn.Module] = []

    def put(made: nn.Module) -> None:
        nonlocal shape
        new = after(made, shape)
        if prod(new) <= MOST:
            modules.append(made)
            shape = new

    for _ in range(length):
        put(layer(draw, kind, shape))
        for _ in range(draw(st.integers(0, 2))):
            choices = ["activation", "activation"]
            if kind == "space" and prod(shape[1:]) > 1:
                choices.append("pool")
            if graph:
                choices += ["norm", "dropout", "keeper", "keeper"]
            choice = draw(st.sampled_from(choices))
            if choice == "activation":
                put(activation(draw, modules[-1] if modules else None))
            elif choice == "pool":
                put(pool(draw, shape))
            elif choice == "norm":
                put(norm(draw, kind, shape))
            elif choice == "dropout":
                put(dropout(draw, kind, shape))
            else:
                put(keeper(draw, kind, shape))
    return modules, shape


@contextmanager
def repeatable(seed: int) -> Iterator[None]:
    """float32 weights drawn from the seed."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:  # hypothesis gives up an example by an exception
        torch.set_default_dtype(dtype)


@st.composite
def chains(draw: Draw) -> Case:
    """Sequential networks for Algorithm 1 with dense matrices: a layer first, samples apart, nothing drawn."""
    seed = draw(st.integers(0, 2**16))
    with repeatable(seed):
        kind, shape = start(draw, ["vector", "tokens", "space"])
        modules, at = body(draw, kind, shape, draw(st.integers(1, 3)), graph=False)
        if not modules or not isinstance(modules[0], LAYERS):
            modules, at = [layer(draw, kind, shape), nn.Tanh()], ()
            at = after(nn.Sequential(*modules), shape)
        if len(at) > 1 or at[0] < 2 or draw(st.booleans()):
            modules += [nn.Flatten(), nn.Linear(prod(at), draw(st.integers(2, 3)), bias=draw(st.booleans()))]
        model = nn.Sequential(*modules)
        (classes,) = after(model, shape)
    return Case(model, kind, shape, classes, (), 1, seed)


@st.composite
def graphs(draw: Draw) -> Case:
    """Any network that is supported: embeddings, norms, dropout, sums, attention, branches, several outputs."""
    seed = draw(st.integers(0, 2**16))
    with repeatable(seed):
        kind, shape = start(draw, ["vector", "tokens", "space", "ids"])
        at, inside = shape, kind
        modules: list[nn.Module] = []
        if kind == "ids":
            modules.append(nn.Embedding(IDS, draw(st.integers(1, 4))))
            at, inside = after(modules[0], shape, ids=True), "tokens"
        more, at = body(draw, inside, at, draw(st.integers(1, 2)), graph=True)
        modules += more
        if draw(st.integers(0, 2)) == 0:
            ways = [body(draw, inside, at, 1, graph=True)[0] for _ in range(2)]
            modules.append(Branches(*[nn.Sequential(*way) for way in ways]))
            at = after(modules[-1], at)
        classes = draw(st.integers(2, 3))
        places: Shape = ()
        if len(at) == 2 and inside == "tokens" and draw(st.booleans()):
            places = at[:1]
        else:
            modules.append(nn.Flatten())
            at = (prod(at),)
        count = draw(st.sampled_from([1, 1, 1, 2]))
        heads = [nn.Linear(at[-1], classes, bias=draw(st.booleans())) for _ in range(count)]
        model = nn.Sequential(*modules, heads[0]) if count == 1 else Heads(nn.Sequential(*modules), heads)
    return Case(model, kind, shape, classes, places, count, seed)
