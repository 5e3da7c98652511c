"""One step of `outer` or `batch` on any graph, with dense matrices: every gradient by autograd, every Q_uu solved.

The value function is V_x = P v, V_xx = P L P' with P the back-propagated gradients of the samples, so a stage needs the
samples' own weight gradients alone:

    Q_u = l_u + P_u v      Q_uu = M / eta + P_u L P_u'      Q_ux dx = P_u L c      c = <p, dx>

with one such problem for each sample (`outer`) or one for all (`batch`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import oracle
import torch
from hostile_networks import LAYERS
from torch import Tensor, nn

Loss = Callable[[Any], Tensor]
"""Each sample's share of the batch loss, from the model's outputs: (B,)."""


@dataclass(frozen=True)
class Settings:
    value: str
    terminal: str
    kind: str
    lr: float
    relax: float = 1.0
    guard: bool = True
    closed_loop: bool = True
    weight_decay: float = 0.0
    damping: float = 0.1
    mean: bool = True


NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm)


def kinds(s: Settings) -> tuple[Any, ...]:
    """The modules with feedback: a norm or an embedding has no Kronecker factors."""
    return LAYERS if s.kind in ("kfac", "ekfac") else (*LAYERS, *NORMS, nn.Embedding)


def state(module: nn.Module, x: Tensor) -> Tensor:
    """What the parameters of a module act on: its input, or for a norm the input with zero mean and unit variance."""
    if not isinstance(module, NORMS):
        return x.detach().clone()
    plain = copy.deepcopy(module)
    plain._forward_hooks.clear()
    plain._forward_pre_hooks.clear()
    nn.init.ones_(plain.weight)
    if getattr(plain, "bias", None) is not None:
        nn.init.zeros_(plain.bias)
    return plain(x.detach()).detach()


@dataclass(eq=False)
class Seen:
    """A layer in the nominal forward pass."""

    layer: nn.Module
    x: Tensor
    h: Tensor  # with graph
    p: Tensor | None = None  # gradient of the batch loss at h
    later: list[Seen] = field(default_factory=list)  # further uses of the same layer

    def __post_init__(self) -> None:
        plain = copy.deepcopy(self.layer)
        plain._forward_hooks.clear()
        plain._forward_pre_hooks.clear()
        shape = self.h.shape[1:]
        if isinstance(plain, NORMS):
            first = isinstance(plain, (nn.GroupNorm, nn.modules.batchnorm._BatchNorm))
            sizes = (-1, *[1] * (len(shape) - 1)) if first else plain.weight.shape
            parts = 1 if getattr(plain, "bias", None) is None else 2

            def scaled(x: Tensor, u: Tensor) -> Tensor:
                w, *b = [part.view(sizes) for part in u.chunk(parts)]
                return (x.view(shape) * w + (b[0] if b else 0.0)).flatten()

            self.step = oracle.Step(scaled, lambda h: h, oracle.flat_u(plain), plain, shape.numel())
        elif isinstance(plain, nn.Embedding):
            self.step = oracle.embedding_step(plain, [], shape)
            self.x = self.x.to(self.h.dtype)
        else:
            self.step = oracle.step_of(plain, [], self.x.shape[1:], shape)

    def pulled(self, wanted: str) -> Tensor:
        """p of each sample through the layer, to its weights "u" or its input "x": (B, …), flat."""
        x = self.x.detach().reshape(len(self.x), -1)
        assert self.p is not None
        p = self.p.flatten(1)
        which = 1 if wanted == "u" else 0
        own = torch.stack([torch.func.vjp(self.step.g, x[i], self.step.u)[1](p[i])[which] for i in range(len(x))])
        return own + sum(use.pulled("u") for use in self.later) if wanted == "u" else own

    def effect(self, x: Tensor, u: Tensor) -> Tensor:
        """What the weights u do to the loss through this use, to first order, at the inputs x: (B,)."""
        assert self.p is not None
        moved = torch.stack([self.step.g(xi, u) - self.step.g(xi, self.step.u) for xi in x.reshape(len(x), -1)])
        return (self.p.flatten(1) * moved).sum(1)

    def write(self, u: Tensor) -> None:
        parameters = [p for p in (self.layer.weight, getattr(self.layer, "bias", None)) if p is not None]
        for p, part in zip(parameters, u.split([p.numel() for p in parameters]), strict=True):
            p.data.copy_(part.view_as(p))


def is_chain(model: nn.Module, x: Tensor, rng: Tensor, s: Settings) -> bool:
    """Whether each layer, and the output, reads the layer before it and nothing else."""
    inputs: list[Tensor] = []
    leaves: list[Tensor] = []

    def cut(module: nn.Module, args: tuple[Tensor, ...], h: Tensor) -> Tensor:
        inputs.append(args[0])
        leaves.append(h.detach().requires_grad_())
        return leaves[-1].clone()

    outputs = run(model, x, rng, s, after=cut)
    ends = [*inputs, *(outputs if isinstance(outputs, tuple) else (outputs,))]
    for t, end in enumerate(ends):
        reads = set()
        if end.requires_grad:
            found = torch.autograd.grad(end.sum(), leaves, allow_unused=True, retain_graph=True)
            reads = {s for s, g in enumerate(found) if g is not None}
        if reads != ({min(t, len(leaves)) - 1} if t else set()):
            return False
    return True


def run(model: nn.Module, x: Tensor, rng: Tensor, s: Settings, before: Any = None, after: Any = None) -> Any:
    """The forward pass with hooks at the layers, the same random numbers and the buffers put back."""
    handles = []
    for module in model.modules():
        if isinstance(module, kinds(s)):
            handles += [module.register_forward_pre_hook(before)] if before else []
            handles += [module.register_forward_hook(after)] if after else []
    buffers = [(m, name, b) for m in model.modules() for name, b in m._buffers.items() if b is not None]
    for m, name, b in buffers:
        m._buffers[name] = b.clone()
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(rng)
        outputs = model(x)
    for m, name, b in buffers:
        m._buffers[name] = b
    for handle in handles:
        handle.remove()
    return outputs


def reference_step(model: nn.Module, x: Tensor, rng: Tensor, loss: Loss, s: Settings) -> None:
    """Moves the weights of `model`."""
    seen: list[Seen] = []

    def remember(module: nn.Module, args: tuple[Tensor, ...], h: Tensor) -> Tensor:
        seen.append(Seen(module, state(module, args[0]), h))
        return h.clone()  # an activation that works in place leaves the handle alone

    chain = is_chain(model, x, rng, s)
    shares = loss(run(model, x, rng, s, after=remember))
    own = {id(p) for stage in seen for p in stage.layer.parameters()}
    rest = [p for p in model.parameters() if id(p) not in own]
    hs = [stage.h for stage in seen]
    grads = torch.autograd.grad(shares.sum(), [*hs, *rest], allow_unused=True)
    for stage, p in zip(seen, grads, strict=False):
        stage.p = torch.zeros_like(stage.h) if p is None else p
    stages: dict[int, Seen] = {}
    for stage in seen:
        if id(stage.layer) in stages:
            stages[id(stage.layer)].later.append(stage)
        else:
            stages[id(stage.layer)] = stage
    seen = list(stages.values())
    B = len(x)
    phi = shares.detach()
    if s.terminal == "sqrt":
        L = torch.where(phi > 1e-300, 0.5 / phi.clamp_min(1e-300), 0.0)
    else:
        L = torch.full_like(phi, float(B) if s.value == "batch" and s.mean else 1.0)
    gains = _batch(seen, L, s) if s.value == "batch" else _outer(seen, L, s)
    open_loop(rest, grads[len(hs) :], s)
    _forward(model, x, rng, seen, gains, s, chain)


Gain = Callable[[Tensor], Tensor]  # u* of c


def metric(stage: Seen, v: Tensor, s: Settings) -> tuple[Tensor, Tensor, Tensor]:
    """M, l_u and P_u of a stage where V_x = P v."""
    assert stage.p is not None
    x, P = stage.x.reshape(len(stage.x), -1), stage.pulled("u")
    l_u = s.weight_decay * stage.step.u
    V_h = v[:, None] * stage.p.flatten(1)
    gradient = v @ P
    if not s.mean:  # the oracle's Kronecker factors are those of a mean
        V_h = V_h / len(x)
        gradient = gradient / len(x) if s.kind == "ekfac" else gradient
    M = oracle.dense_M(s.kind, stage.step, x, V_h, l_u + gradient, l_u, {"damping": s.damping})
    return M, l_u, P


def _batch(seen: list[Seen], L: Tensor, s: Settings) -> list[Gain]:
    v, L = torch.full_like(L, s.relax), torch.diag(L)
    gains: list[Gain] = []
    for stage in reversed(seen):
        M, l_u, P = metric(stage, v, s)
        Q_u, Q_uu = l_u + v @ P, M / s.lr + P.T @ L @ P
        k, PL = torch.linalg.solve(Q_uu, Q_u), P.T @ L
        K = torch.linalg.solve(Q_uu, PL)
        gains.insert(0, lambda c, u=stage.step.u, M=M, k=k, K=K: u + oracle.applied(s.kind, M, s.lr, -k - K @ c))
        v, L = v - PL.T @ k, L - PL.T @ K
    return gains


def _outer(seen: list[Seen], L: Tensor, s: Settings) -> list[Gain]:
    v, B = torch.ones_like(L), len(L)
    gains: list[Gain] = []
    for stage in reversed(seen):
        M, l_u, P = metric(stage, v, s)
        Q_u = l_u / B + v[:, None] * P  # of each sample
        k = torch.linalg.solve(M / s.lr, Q_u.sum(0))
        Q_uu = (M / s.lr).expand(B, *M.shape)
        if s.guard:
            Q_uu = Q_uu + L[:, None, None] * P[:, :, None] * P[:, None, :]
        both = torch.linalg.solve(Q_uu, torch.stack([Q_u, L[:, None] * P], 2))  # (B, n_u, 2)
        K = both[:, :, 1]
        gains.insert(0, lambda c, u=stage.step.u, M=M, k=k, K=K: u + oracle.applied(s.kind, M, s.lr, -k - c @ K))
        lost = L[:, None] * torch.einsum("bu,bur->br", P, both)
        v, L = v - lost[:, 0], L - lost[:, 1]
    return gains


def open_loop(rest: list[nn.Parameter], grads: tuple[Tensor | None, ...], s: Settings) -> None:
    """Parameters without feedback: Adam beside `batch`, else the base optimizer; its first step."""
    for p, grad in zip(rest, grads, strict=True):
        if grad is None:
            continue
        g = grad + s.weight_decay * p.detach()
        if s.value == "batch":
            p.data -= 1e-3 * g / (g.abs() + 1e-8)
        elif s.kind == "rmsprop":
            p.data -= s.lr * g / ((0.01 * g**2).sqrt() + 1e-8)
        elif s.kind == "adam":
            p.data -= s.lr * g / (g.abs() + 1e-8)
        else:
            p.data -= s.lr * g


@torch.no_grad()
def _forward(
    model: nn.Module, x: Tensor, rng: Tensor, seen: list[Seen], gains: list[Gain], s: Settings, chain: bool
) -> None:
    ledger = torch.zeros(len(x))
    at = {id(stage.layer): t for t, stage in enumerate(seen)}
    done: set[int] = set()

    def control(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        nonlocal ledger
        t = at[id(module)]
        stage = seen[t]
        if t in done:
            return
        done.add(t)
        x_hat = state(module, args[0])
        c = ledger
        if chain:
            dx = (x_hat - stage.x).reshape(len(x_hat), -1)
            c = (stage.pulled("x") * dx).sum(1)  # also before the first layer: an embedding may have moved
        if not s.closed_loop:
            c = torch.zeros(len(x))
        u = gains[t](c)
        ledger = ledger + stage.effect(x_hat, u) + sum(use.effect(use.x, u) for use in stage.later)
        stage.write(u)

    run(model, x, rng, s, before=control)
