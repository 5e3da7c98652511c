"""The backward sweep of Algorithm 1 on a batch stacked into one state, for layers x_{t+1} = sigma(x~_t W~).

The same numbers as `ddpnopt.control.backward.backward` with proximal damping, without ever forming f_z of the stacked
batch: with h = x~ W~, x~ = (x, 1) and sigma elementwise, all of Eq. (3) follows from V_h = sigma' V_x and
V_hh = sigma' V_xx sigma' + diag(sigma'' V_x), each (B o) wide, by products with x~ and W~ alone.

Shapes: B samples, i inputs, j = i + 1 with the bias (or i without), o outputs. Controls are W~ as (j, o).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddpnopt.control.backward import Sweep


@dataclass(frozen=True)
class SweepLayer:
    """One stage at the current trajectory."""

    x: Tensor  # x~, (B, j)
    u: Tensor  # W~, (j, o)
    first: Tensor  # sigma' at h, (B, o)
    second: Tensor  # sigma'', (B, o)
    inputs: int  # i: how many of the j are the state


def linearise(sigma: Callable[[Tensor], Tensor], x: Tensor, parameters: Sequence[Tensor]) -> SweepLayer:
    """The layer with the elementwise function sigma at the input x (B, i); parameters are weight and bias, if any."""
    weight, *bias = parameters
    u = torch.cat([weight.mT, *(b.unsqueeze(0) for b in bias)])
    ones = [x.new_ones(len(x), 1)] if bias else []
    x_tilde = torch.cat([x, *ones], dim=1)
    return SweepLayer(x_tilde, u, *_activation_derivatives(sigma, x_tilde @ u), x.shape[1])


def _activation_derivatives(sigma: Callable[[Tensor], Tensor], h: Tensor) -> tuple[Tensor, Tensor]:
    """sigma' and sigma'' at h."""
    with torch.enable_grad():
        h = h.detach().requires_grad_()
        first = torch.autograd.grad(sigma(h).sum(), h, create_graph=True)[0]
        if not first.requires_grad:  # sigma is the identity
            return first, torch.zeros_like(first)
        second = torch.autograd.grad(first.sum(), h, materialize_grads=True)[0]
    return first.detach(), second


def sweep(layers: list[SweepLayer], phi_x: Tensor, phi_xx: Tensor, mu: float, decay: float) -> Sweep:
    """Gains for the stage cost decay/2 |u|^2 + mu/2 |du|^2; phi_x is (B n_T,), phi_xx (B n_T, B n_T).

    The first stage's state is a constant of the problem, which has one number instead; its K is zero. The sweep ends
    at the first stage whose Q_uu + mu I is not positive definite: `ok` is false then, and there are no gains.
    """
    V_x, V_xx = phi_x, phi_xx
    linear = phi_x.new_zeros(1)
    ks: list[Tensor] = []
    Ks: list[Tensor] = []
    for t in reversed(range(len(layers))):
        layer = layers[t]
        B, o = layer.first.shape
        s = layer.first.reshape(-1)
        V_h = s * V_x
        V_hh = V_xx * s * s[:, None]
        V_hh.diagonal().add_(layer.second.reshape(-1) * V_x)
        gains = _first(layer, V_h.reshape(B, o), V_hh, mu, decay) if t == 0 else _inner(layer, V_h, V_hh, mu, decay)
        if gains is None:
            return Sweep((), (), linear, linear, torch.zeros(1, dtype=torch.bool, device=phi_x.device))
        linear = linear + gains.linear
        V_x, V_xx = gains.V_x, gains.V_xx
        ks.append(_as_parameters(gains.k, layer)[None, None])
        Ks.append(_as_parameters(gains.K, layer)[None, None])
    # k' (Q_uu + mu I) k = -k' Q_u: nothing is clamped
    return Sweep(tuple(ks[::-1]), tuple(Ks[::-1]), linear, -linear, torch.isfinite(linear))


@dataclass(frozen=True)
class _Gains:
    k: Tensor  # (j o,)
    K: Tensor  # (j o, B i)
    linear: Tensor  # k' Q_u
    V_x: Tensor  # (B i,)
    V_xx: Tensor  # (B i, B i)


def _inner(layer: SweepLayer, V_h: Tensor, V_hh: Tensor, mu: float, decay: float) -> _Gains | None:
    B, j = layer.x.shape
    o, i = layer.u.shape[1], layer.inputs
    W = layer.u[:i]  # (i, o)
    V_hx = torch.matmul(V_hh.reshape(B * o, B, o), W.mT).reshape(B, o * B * i)
    Q_x = (V_h.reshape(B, o) @ W.mT).reshape(-1)
    Q_xx = torch.matmul(W, V_hx.reshape(B, o, B * i)).reshape(B * i, B * i)
    Q_u = _weight_gradient(layer, V_h.reshape(B, o), decay)
    Q_ux = torch.matmul(layer.x.mT, V_hx).view(j, o, B, i)
    Q_ux[:i].diagonal(dim1=0, dim2=3).add_(V_h.reshape(B, o).mT.unsqueeze(-1))  # V_h . h_ux
    Q_ux = Q_ux.reshape(j * o, B * i)
    factor = _damped_factor(layer.x, V_hh, o, mu + decay)
    if factor is None:
        return None
    inverse = torch.cholesky_inverse(factor)  # with a product three times as fast as cholesky_solve on so many columns
    k, K = (inverse @ Q_u).neg_(), (inverse @ Q_ux).neg_()
    V_x = Q_x + Q_ux.mT @ k
    V_xx = torch.addmm(Q_xx, K.mT, Q_ux)  # Eq. (5)
    return _Gains(k, K, k @ Q_u, V_x, 0.5 * (V_xx + V_xx.mT))


def _first(layer: SweepLayer, V_h: Tensor, V_hh: Tensor, mu: float, decay: float) -> _Gains | None:
    """Where the state is constant, weights matter only along the span of the batch: B directions where B < j.

    Across it Q_uu is decay I and Q_u decay u.
    """
    Q_u = _weight_gradient(layer, V_h, decay)
    o = V_h.shape[1]
    basis, R = torch.linalg.qr(layer.x.mT)  # (j, r), (r, B) with r = min(B, j)
    factor = _damped_factor(R.mT, V_hh, o, mu + decay)
    if factor is None:
        return None
    g = Q_u.reshape(-1, o)
    inside = basis.mT @ g
    k = basis @ torch.cholesky_solve(inside.reshape(-1, 1), factor).view_as(inside)
    k = -(k + (g - basis @ inside) / (mu + decay)).reshape(-1)
    none = k.new_zeros(1)
    return _Gains(k, k.new_zeros(len(k), 1), k @ Q_u, none, none[None])


def _weight_gradient(layer: SweepLayer, V_h: Tensor, decay: float) -> Tensor:
    return (layer.x.mT @ V_h + decay * layer.u).reshape(-1)


def _damped_factor(x: Tensor, V_hh: Tensor, o: int, damping: float) -> Tensor | None:
    """Cholesky factor of h_u' V_hh h_u + damping I, (j o, j o); None where it is not positive definite."""
    B, j = x.shape
    half = (x.mT @ V_hh.reshape(B, o * B * o)).reshape(j * o, B, o)
    H = torch.matmul(x.mT, half).reshape(j * o, j * o)
    H.diagonal().add_(damping)
    factor, info = torch.linalg.cholesky_ex(H)
    return factor if int(info) == 0 else None


def _as_parameters(rows: Tensor, layer: SweepLayer) -> Tensor:
    """Rows in the order (j, o) of W~ to that of weight (o, i) and bias (o,)."""
    j, o = layer.u.shape
    i, rest = layer.inputs, rows.shape[1:]
    blocks = rows.reshape(j, o, *rest)
    return torch.cat([blocks[:i].transpose(0, 1).reshape(i * o, *rest), *blocks[i:]])
