"""A dense oracle: Algorithm 1 of the paper, literally, on tiny networks in float64.

Every f_x, f_u, f_xx, f_ux, f_uu is built by autograd as a full tensor, Q_uu is a dense matrix, the gains k and K are
dense matrices. Slow, and independent of the package: it shares no code with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev

Function = Callable[..., Tensor]


@dataclass
class Step:
    """One stage: x' = sigma(g(x, u)), all flat, one sample."""

    g: Function
    sigma: Function
    u: Tensor
    layer: nn.Module
    n_h: int  # outputs of the layer: the first entries of g; what is carried past it stands behind

    def f(self, x: Tensor, u: Tensor) -> Tensor:
        return self.sigma(self.g(x, u))


def flat_u(layer: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in (layer.weight, getattr(layer, "bias", None)) if p is not None])


class Scale(nn.Module):
    """What a norm does after it has normalised: h = w o x + b."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight, self.bias = norm.weight, getattr(norm, "bias", None)
        self.first = isinstance(norm, nn.GroupNorm)

    def forward(self, x: Tensor) -> Tensor:
        w, b = (self.weight, self.bias) if self.bias is not None else (self.weight, torch.zeros_like(self.weight))
        sizes = (-1, *[1] * (x.dim() - 2)) if self.first else w.shape
        return x * w.view(sizes) + b.view(sizes)


def with_norms_apart(net: nn.Sequential) -> nn.Sequential:
    """Each norm as a normalisation without parameters and the scale and shift behind it."""
    modules: list[nn.Module] = []
    for m in net:
        if isinstance(m, nn.LayerNorm):
            modules += [nn.LayerNorm(m.normalized_shape, m.eps, elementwise_affine=False), Scale(m)]
        elif isinstance(m, nn.RMSNorm):
            modules += [nn.RMSNorm(m.normalized_shape, m.eps, elementwise_affine=False), Scale(m)]
        elif isinstance(m, nn.GroupNorm):
            modules += [nn.GroupNorm(m.num_groups, m.num_channels, m.eps, affine=False), Scale(m)]
        else:
            modules.append(m)
    return nn.Sequential(*modules)


def steps_of(net: nn.Sequential, x: Tensor) -> list[Step]:
    """Cut a Sequential into stages: a layer and what follows it up to the next one."""
    modules = list(net)
    kinds = (nn.Linear, nn.modules.conv._ConvNd, nn.Embedding, Scale)
    starts = [i for i, m in enumerate(modules) if isinstance(m, kinds)]
    assert starts[0] == 0
    steps = []
    for a, b in zip(starts, [*starts[1:], len(modules)], strict=True):
        layer, rest = modules[a], modules[a + 1 : b]
        h = layer(x)
        if isinstance(layer, nn.Embedding):
            steps.append(embedding_step(layer, rest, h.shape[1:]))
        else:
            steps.append(step_of(layer, rest, x.shape[1:], h.shape[1:]))
        for m in rest:
            h = m(h)
        x = h.detach()
    return steps


def step_of(layer: nn.Module, rest: list[nn.Module], x_shape: torch.Size, h_shape: torch.Size) -> Step:
    names = [n for n in ("weight", "bias") if getattr(layer, n, None) is not None]
    shapes = [getattr(layer, n).shape for n in names]

    def g(x: Tensor, u: Tensor) -> Tensor:
        pieces = torch.split(u, [s.numel() for s in shapes])
        params = {n: p.view(s) for n, p, s in zip(names, pieces, shapes, strict=True)}
        return functional_call(layer, params, (x.view(1, *x_shape),)).flatten()

    return Step(g, lambda h: _through(rest, h.view(1, *h_shape)), flat_u(layer), layer, h_shape.numel())


def embedding_step(layer: nn.Embedding, rest: list[nn.Module], h_shape: torch.Size) -> Step:
    """A state of ids, as floating-point numbers; the row of the padding does not depend on u."""

    def g(x: Tensor, u: Tensor) -> Tensor:
        ids, rows = x.long(), u.view(layer.weight.shape)
        h = rows[ids]
        if layer.padding_idx is not None:
            h = torch.where((ids == layer.padding_idx)[:, None], h.detach(), h)
        return h.flatten()

    return Step(g, lambda h: _through(rest, h.view(1, *h_shape)), flat_u(layer), layer, h_shape.numel())


def _through(modules: list[nn.Module], h: Tensor) -> Tensor:
    for m in modules:
        h = m(h)
    return h.flatten()


# -- dense curvatures, one step from an empty state -------------------------------------------------------------------


def joint_index(layer: nn.Module) -> Tensor:
    """Where in u = [vec W, b] each entry of the joint matrices stands: (g, O, J)."""
    O, groups = layer.weight.shape[0], getattr(layer, "groups", 1)
    index = torch.arange(layer.weight.numel()).view(groups, O // groups, -1)
    if layer.bias is not None:
        index = torch.cat([index, layer.weight.numel() + torch.arange(O).view(groups, -1, 1)], 2)
    return index


def place_index(layer: nn.Module, n_h: int) -> Tensor:
    """Where in the flat h each output at each place stands: (P, g, O)."""
    O, groups = layer.weight.shape[0], getattr(layer, "groups", 1)
    if isinstance(layer, nn.Linear):
        return torch.arange(n_h).view(-1, 1, O)
    return torch.arange(n_h).view(groups, O // groups, -1).permute(2, 0, 1)


def dense_M(
    kind: str, step: Step, xs: Tensor, V_h: Tensor, Q_u: Tensor, l_u: Tensor, options: dict[str, float]
) -> Tensor:
    """M after the first step; V_h are shares of a mean loss, so B V_h are the samples' own."""
    B, n_u = len(xs), len(step.u)
    if kind == "identity":
        return torch.eye(n_u)
    if kind == "rmsprop":
        return torch.diag(((1 - 0.99) * Q_u**2).sqrt() + 1e-8)
    if kind == "adam":
        return torch.diag(Q_u.abs() + 1e-8)  # bias correction makes the first average the square itself
    index, places = joint_index(step.layer), place_index(step.layer, step.n_h)
    J = torch.stack([jacrev(step.g, 1)(x, step.u) for x in xs])  # (B, n_h, n_u)
    M = torch.zeros(n_u, n_u)
    for group in range(index.shape[0]):
        at = index[group]  # (O, J)
        X = J[:, places[:, group, 0]][:, :, at[0]].flatten(0, 1)  # (B P, J): the inputs at all places
        V = B * V_h[:, places[:, group]].flatten(0, 1)  # (B P, O)
        A, G = X.T @ X / len(X), V.T @ V / B
        if kind == "kfac":
            mean_A, mean_G = (max(float(f.trace()) / len(f), 1e-30) for f in (A, G))  # a factor may be zero: dead units
            pi = (mean_A / mean_G) ** 0.5
            root = options["damping"] ** 0.5
            block = torch.kron(G + root / pi * torch.eye(len(G)), A + pi * root * torch.eye(len(A)))
        else:
            (a, U_A), (b, U_G) = torch.linalg.eigh(A), torch.linalg.eigh(G)
            basis = torch.kron(U_G, U_A)
            mean = basis.T @ (Q_u - l_u)[at.flatten()]
            m2 = 0.75 * torch.kron(b.clamp_min(0), a.clamp_min(0)) + 0.25 * B * mean**2
            block = basis @ torch.diag(m2 + options["damping"]) @ basis.T
        M[at.flatten()[:, None], at.flatten()] = block
    return M


def applied(kind: str, M: Tensor, eta: float, du: Tensor) -> Tensor:
    """The update du = -eta M^-1 d; an adaptive diagonal M is at least what d itself would make it."""
    least = {"rmsprop": (1 - 0.99) ** 0.5, "adam": 1.0}.get(kind)
    if least is None:
        return du
    d = -M.diagonal() * du / eta
    return -eta * d / torch.maximum(M.diagonal(), least * d.abs() + 1e-8)


# -- Algorithm 1 ------------------------------------------------------------------------------------------------------


@dataclass
class Result:
    k: list[Tensor] = field(default_factory=list)  # per stage: (B, n_u)
    K: list[Tensor] = field(default_factory=list)  # (B, n_u, n_x)
    V_x: list[Tensor] = field(default_factory=list)  # (B, n_x)
    V_xx: list[Tensor] = field(default_factory=list)  # (B, n_x, n_x)
    u: list[Tensor] = field(default_factory=list)  # new weights
    M: list[Tensor] = field(default_factory=list)


def trajectory(steps: list[Step], X: Tensor) -> list[Tensor]:
    xs = [X.flatten(1)]
    for step in steps:
        xs.append(torch.stack([step.f(x, step.u) for x in xs[-1]]))
    return xs


def positive_part(H: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(H)
    return vectors @ torch.diag(values.clamp_min(0)) @ vectors.T


def ddp(
    steps: list[Step],
    X: Tensor,
    V_x: Tensor,
    V_xx: Tensor,
    *,
    eta: float,
    kind: str = "identity",
    order: int = 1,
    guard: bool = False,
    vxx_reg: float = 0.0,
    weight_decay: float = 0.0,
    closed_loop: bool = True,
    own: bool = False,
    options: dict[str, float] | None = None,
) -> Result:
    """Sample by sample: eq. 4, 5 and 6 with Q_uu = M / eta, then the forward pass of lines 14 to 18.

    With `own` V_x and V_xx are those of the samples' own losses, and line 10 takes the mean.
    """
    B, xs, out = len(X), trajectory(steps, X), Result()
    share = 1 / B if own else 1.0  # of a sample in the update
    for step, x in zip(reversed(steps), reversed(xs[:-1]), strict=True):
        l_u = weight_decay * step.u
        h = torch.stack([step.g(xi, step.u) for xi in x])
        sigma_h = torch.stack([jacrev(step.sigma)(hi) for hi in h])
        V_h = torch.einsum("bij,bi->bj", sigma_h, V_x)
        f_x = torch.stack([jacrev(step.f, 0)(xi, step.u) for xi in x])
        f_u = torch.stack([jacrev(step.f, 1)(xi, step.u) for xi in x])
        Q_u = l_u / (share * B) + torch.einsum("biu,bi->bu", f_u, V_x)
        Q_x = torch.einsum("bix,bi->bx", f_x, V_x)
        Q_xx = f_x.mT @ V_xx @ f_x
        Q_ux = f_u.mT @ V_xx @ f_x
        V_hh = sigma_h.mT @ V_xx @ sigma_h
        if order == 2:
            for i in range(B):
                Q_xx[i] += torch.einsum("i,ixy->xy", V_x[i], hessian(step.f, 0)(x[i], step.u))
                Q_ux[i] += torch.einsum("i,iux->ux", V_x[i], jacrev(jacrev(step.f, 1), 0)(x[i], step.u))
                V_hh[i] += torch.einsum("i,ixy->xy", V_x[i], hessian(step.sigma)(h[i]))
        M = dense_M(kind, step, x, share * V_h, share * Q_u.sum(0), l_u, options or {})
        out.M.insert(0, M)
        Q_uu = (M / eta).expand(B, -1, -1)
        out.k.insert(0, -torch.linalg.solve(Q_uu, Q_u))
        if guard:  # the stage's own Gauss-Newton term, for all that concerns feedback
            g_u = torch.stack([jacrev(step.g, 1)(xi, step.u) for xi in x])
            own = torch.stack([positive_part(v) for v in V_hh]) if order == 2 else V_hh
            Q_uu = Q_uu + g_u.mT @ own @ g_u
        out.K.insert(0, -torch.linalg.solve(Q_uu, Q_ux))
        V_x = Q_x - (Q_ux.mT @ torch.linalg.solve(Q_uu, Q_u)[:, :, None])[:, :, 0]
        V_xx = Q_xx - Q_ux.mT @ torch.linalg.solve(Q_uu, Q_ux) + vxx_reg * torch.eye(x.shape[1])
        out.V_x.insert(0, V_x)
        out.V_xx.insert(0, V_xx)
    x_hat = xs[0]
    for t, step in enumerate(steps):
        dx = x_hat - xs[t] if closed_loop else torch.zeros_like(x_hat)
        du = share * (out.k[t] + (out.K[t] @ dx[:, :, None])[:, :, 0]).sum(0)
        out.u.append(step.u + applied(kind, out.M[t], eta, du))
        x_hat = torch.stack([step.f(x, out.u[t]) for x in x_hat])
    return out


def joint_ddp(
    steps: list[Step],
    X: Tensor,
    V_x: Tensor,
    V_xx: Tensor,
    *,
    eta: float,
    kind: str = "identity",
    weight_decay: float = 0.0,
    closed_loop: bool = True,
    options: dict[str, float] | None = None,
) -> Result:
    """The batch as one state (B n,): the same equations with Q_uu = M / eta + f_u' V_xx f_u, all dense.

    V_x: (B n,), V_xx: (B n, B n).
    """
    B, xs, out = len(X), trajectory(steps, X), Result()
    for step, x in zip(reversed(steps), reversed(xs[:-1]), strict=True):
        l_u = weight_decay * step.u
        h = torch.stack([step.g(xi, step.u) for xi in x])
        sigma_h = torch.block_diag(*[jacrev(step.sigma)(hi) for hi in h])
        f_x = torch.block_diag(*[jacrev(step.f, 0)(xi, step.u) for xi in x])
        f_u = torch.cat([jacrev(step.f, 1)(xi, step.u) for xi in x])
        Q_u, Q_x = l_u + f_u.T @ V_x, f_x.T @ V_x
        Q_xx, Q_ux = f_x.T @ V_xx @ f_x, f_u.T @ V_xx @ f_x
        V_h = (sigma_h.T @ V_x).view(B, -1)
        out.M.insert(0, dense_M(kind, step, x, V_h, Q_u, l_u, options or {}))
        Q_uu = out.M[0] / eta + f_u.T @ V_xx @ f_u
        out.k.insert(0, -torch.linalg.solve(Q_uu, Q_u))
        out.K.insert(0, -torch.linalg.solve(Q_uu, Q_ux))
        V_x = Q_x + Q_ux.T @ out.k[0]
        V_xx = Q_xx + Q_ux.T @ out.K[0]
        out.V_x.insert(0, V_x)
        out.V_xx.insert(0, V_xx)
    x_hat = xs[0]
    for t, step in enumerate(steps):
        dx = (x_hat - xs[t]).flatten() if closed_loop else torch.zeros(xs[t].numel())
        out.u.append(step.u + applied(kind, out.M[t], eta, out.k[t] + out.K[t] @ dx))
        x_hat = torch.stack([step.f(x, out.u[t]) for x in x_hat])
    return out
