"""f_u M^-1 f_u' of each sample and related products, which the full value function needs of layer and metric together.

Outputs are flat here, n_h = all dimensions of h after the batch, in memory order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ddpnopt.linear.layer import Layer, per_sample_dot
from ddpnopt.linear.metric import Metric


def output_metric(layer: Layer, x: Tensor, metric: Metric) -> Tensor:
    """N = g_u M^-1 g_u' of each sample: a multiple (B, 1) of I or a diagonal (B, n_h) where it has that form.

    Else it is (B, n_h, n_h).
    """
    if x.dim() == 2 and metric.is_identity:
        return per_sample_dot(x, x)[:, None] + float(layer.bias)  # |x~|^2
    X = metric.columns(layer.augmented(x))  # (B, P, g, J)
    D = metric.diagonal(layer)
    _, O, _ = layer.joint_shape
    B, P, g, _ = X.shape
    if P == 1 and metric.T_G is None:
        scale = X.square().sum(3, keepdim=True) if D is None else torch.einsum("bpgj,goj->bpgo", X.square(), D)
        return layer.unrows(scale.expand(B, 1, g, O))
    # S[r, p, q] = sum_j D_rj x~_p x~_q for output r of the rotated frame
    if D is None:
        S = torch.einsum("bpgj,bqgj->bgpq", X, X)[:, :, None].expand(B, g, O, P, P)
    else:
        S = torch.einsum("bpgj,goj,bqgj->bgopq", X, D, X)
    if metric.T_G is None:
        blocks = torch.diag_embed(S.permute(0, 1, 3, 4, 2))  # (B, g, P, P, O, O)
    else:
        blocks = torch.einsum("gro,bgrpq,grn->bgpqon", metric.T_G, S, metric.T_G)
    N = X.new_zeros(B, P, g, O, P, g, O)
    for k in range(g):
        N[:, :, k, :, :, k] = blocks[:, k].permute(0, 1, 3, 2, 4)
    n = P * g * O
    half = layer.unrows(N.view(B * n, P, g, O)).view(B, n, n)  # columns in memory order, rows not yet
    return layer.unrows(half.mT.reshape(B * n, P, g, O)).view(B, n, n)


def mixed_terms(layer: Layer, x: Tensor, V_h: Tensor, metric: Metric) -> tuple[Tensor, Tensor]:
    """With E = V_h . g_ux (eq. 27): g_u M^-1 E (B, n_h, n_x) and E' M^-1 E (B, n_x, n_x)."""
    if x.dim() == 2:
        return _mixed_linear(layer, x, V_h, metric)
    B, n = x.shape[0], x[0].numel()
    basis = torch.eye(n, dtype=x.dtype, device=x.device).view(n, 1, *x.shape[1:])
    basis = basis.expand(n, *x.shape).flatten(0, 1)
    V = layer.rows(V_h).repeat(n, 1, 1, 1)
    E = torch.einsum("bpgo,bpgj->bgoj", V, layer.patches(basis))
    if layer.bias:
        E = torch.nn.functional.pad(E, (0, 1))  # the bias does not act on x
    E = E.view(n, B, *E.shape[1:])
    solved = layer.join(metric.solve(layer, layer.split(E)))
    h = torch.einsum("bpgj,nbgoj->nbpgo", layer.augmented(x), solved)
    NE = layer.unrows(h.flatten(0, 1)).view(n, B, -1).permute(1, 2, 0)
    EE = torch.einsum("nbgoj,mbgoj->bnm", E, solved)
    return NE, EE


def _mixed_linear(layer: Layer, x: Tensor, V_h: Tensor, metric: Metric) -> tuple[Tensor, Tensor]:
    n = x.shape[1]
    X = metric.columns(layer.augmented(x))[:, 0, 0]  # (B, J)
    a = metric.rows(layer.rows(V_h))[:, 0, 0]  # (B, O): E e_k is a (x) T_A e_k in the rotated frame
    T = torch.eye(X.shape[1], dtype=x.dtype, device=x.device) if metric.T_A is None else metric.T_A[0]
    T = T[:, :n]
    D = metric.diagonal(layer)
    if D is None:
        NE = a[:, :, None] * (X @ T)[:, None, :]
        EE = a.square().sum(1)[:, None, None] * (T.T @ T)
    else:
        NE = a[:, :, None] * ((X[:, None, :] * D[0]) @ T)
        EE = torch.einsum("jk,bj,jl->bkl", T, a.square() @ D[0], T)
    if metric.T_G is not None:
        NE = metric.T_G[0].T @ NE
    return NE, EE
