"""The backward sweep, lines 2 to 6 of Algorithm 1, and the costate sweep that gives the gradient of J."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .boxqp import solve_box
from .derivatives import Expansion, contractions
from .stages import Blocks, Limits, Run, Trajectory, select, stack, unstack

Regularize = Literal["uu", "xx", "proximal"]


@dataclass(frozen=True)
class Sweep:
    """The gains, and the model's promise: a step of size a changes J by a * linear + a^2 / 2 * quadratic."""

    k: Blocks  # (S, B, m)
    K: Blocks  # (S, B, m, n)
    linear: Tensor  # (B,): sum of k' Q_u
    quadratic: Tensor  # (B,): sum of k' Q_uu k
    ok: Tensor  # (B,): Q_uu was positive definite at every stage; where it was not, the rest means nothing

    def select(self, index: Tensor) -> Sweep:
        """Keep the problems in `index`."""
        k, K = select(self.k, index), select(self.K, index)
        return Sweep(k, K, self.linear[index], self.quadratic[index], self.ok[index])


def backward(
    expansion: Expansion,
    runs: Sequence[Run],
    mu: Tensor,
    *,
    regularize: Regularize,
    trajectory: Trajectory,
    limits: Limits | None,
) -> Sweep:
    """Gains of the policy du = k + K dx by Eq. (3) to (5), one problem per row of the batch.

    mu (B,) is Levenberg-Marquardt damping: "uu" adds mu I to Q_uu, "xx" adds it to V_xx inside Q_uu and Q_ux,
    which keeps the new states, not the new controls, near the old ones (Tassa, Erez, Todorov 2012). There damping
    belongs to the gains alone: the value function is that of the undamped model under these gains,
    V_x = Q_x + K'Q_uu k + K'Q_u + Q_ux'k and likewise V_xx, which is Eq. (5) when mu = 0 and no control is
    clamped. "proximal" counts mu/2 |du|^2 as a part of the stage cost, in the value function, too: Eq. (5) with
    Q_uu + mu I for Q_uu. Then V_xx is higher by mu K'K, and earlier stages stay positive definite more often.
    """
    V_x, V_xx = expansion.phi_x, expansion.phi_xx
    f_zs, l_zs, l_zzs = unstack(expansion.f_z), unstack(expansion.l_z), unstack(expansion.l_zz)
    tensor_terms = contractions(expansion, runs)
    # Room for du at each stage
    rooms = None
    if limits is not None:
        controls = unstack(trajectory.u)
        rooms = [(lo - u, hi - u) for (lo, hi), u in zip(limits.stages(), controls, strict=True)]
    linear, quadratic = torch.zeros_like(mu), torch.zeros_like(mu)
    ok = torch.ones_like(mu, dtype=torch.bool)
    damping = mu[:, None, None]
    ks: list[Tensor] = []
    Ks: list[Tensor] = []
    for run in reversed(runs):
        n = run.n
        eye = torch.eye(run.m, dtype=mu.dtype, device=mu.device)
        for t in reversed(range(run.start, run.stop)):
            f_z = f_zs[t]  # (B, n_next, nz)
            f_z_T = f_z.mT
            Q_z = torch.baddbmm(l_zs[t].unsqueeze(-1), f_z_T, V_x.unsqueeze(-1))  # (B, nz, 1)
            Q_zz = torch.baddbmm(l_zzs[t], f_z_T, torch.bmm(V_xx, f_z))  # (B, nz, nz)
            contract = tensor_terms[t]
            if contract is not None:
                Q_zz = Q_zz + contract(V_x)
            Q_x, Q_u = Q_z[:, :n], Q_z[:, n:]
            Q_xx, Q_ux, Q_uu = Q_zz[:, :n, :n], Q_zz[:, n:, :n], Q_zz[:, n:, n:]
            if regularize == "proximal":
                Q_uu = Q_uu + damping * eye
                H, H_ux = Q_uu, Q_ux
            elif regularize == "uu":
                H, H_ux = Q_uu + damping * eye, Q_ux
            else:
                extra = damping * torch.bmm(f_z_T[:, n:], f_z)  # (B, m, nz)
                H, H_ux = Q_uu + extra[:, :, n:], Q_ux + extra[:, :, :n]
            room = None if rooms is None else rooms[t]
            k, K, good = _gains(H, Q_u, H_ux, room)
            ok = ok & good
            H_k = torch.bmm(Q_uu, k)
            K_T = K.mT
            linear = linear + (k * Q_u).sum((1, 2))
            quadratic = quadratic + (k * H_k).sum((1, 2))
            V_x = (Q_x + torch.bmm(K_T, H_k + Q_u) + torch.bmm(Q_ux.mT, k)).squeeze(-1)
            cross = torch.bmm(K_T, Q_ux)
            V_xx = Q_xx + torch.bmm(torch.bmm(K_T, Q_uu), K) + cross + cross.mT
            V_xx = 0.5 * (V_xx + V_xx.mT)  # rounding would otherwise grow with the horizon
            ks.append(k.squeeze(-1))
            Ks.append(K)
    finite = torch.isfinite(linear) & torch.isfinite(quadratic)
    return Sweep(stack(runs, ks[::-1]), stack(runs, Ks[::-1]), linear, quadratic, ok & finite)


def costate_gradient(expansion: Expansion, runs: Sequence[Run]) -> Blocks:
    """grad_u J as blocks (S, B, m), by the adjoint equation (19b): p_t = l_x + f_x' p_{t+1}, grad_u = l_u +
    f_u' p.

    Q_u of the sweep is not this gradient unless all later gains vanish, so convergence is measured here.
    """
    f_zs, l_zs = unstack(expansion.f_z), unstack(expansion.l_z)
    p = expansion.phi_x.unsqueeze(-1)
    gradients: list[Tensor] = []
    for run in reversed(runs):
        for t in reversed(range(run.start, run.stop)):
            H_z = torch.baddbmm(l_zs[t].unsqueeze(-1), f_zs[t].mT, p)  # (B, nz, 1)
            p = H_z[:, : run.n]
            gradients.append(H_z[:, run.n :].squeeze(-1))
    return stack(runs, gradients[::-1])


def gradient_norm(gradient: Blocks, trajectory: Trajectory, limits: Limits | None) -> Tensor:
    """Largest component of grad_u J; with limits, of u - clip(u - grad_u J), zero exactly at a KKT point."""
    norms = []
    for r, (g, u) in enumerate(zip(gradient, trajectory.u, strict=True)):
        if limits is not None:
            # not u - clip(u - g): that would round g to the precision of u
            g = g.clamp(u - limits.upper[r], u - limits.lower[r])
        norms.append(g.abs().amax((0, 2)))
    return torch.stack(norms).amax(0)


def _gains(H: Tensor, Q_u: Tensor, H_ux: Tensor, room: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
    """k = -H^-1 Q_u (B, m, 1) and K = -H^-1 H_ux (B, m, n), Eq. (4), or their box-constrained likes; and
    success (B,).

    Where H is not positive definite the factor is replaced by the identity, so that one bad problem costs the
    others nothing; its gains are zeroed so that it cannot breed infinities either.
    """
    if room is None:
        factor, info = torch.linalg.cholesky_ex(H)
        good = info == 0
        rows = good[:, None, None]
        if not bool(good.all()):
            factor = torch.where(rows, factor, torch.eye(H.shape[-1], dtype=H.dtype, device=H.device))
        both = -torch.cholesky_solve(torch.cat([Q_u, H_ux], dim=-1), factor)
        both = torch.where(rows, both, 0.0)
        return both[..., :1], both[..., 1:], good
    solution = solve_box(H, Q_u.squeeze(-1), *room)
    # The factor is the identity on clamped components, so their rows of K come out zero.
    K = -torch.cholesky_solve(H_ux * solution.free.unsqueeze(-1), solution.factor)
    rows = solution.ok[:, None, None]
    return torch.where(rows, solution.v.unsqueeze(-1), 0.0), torch.where(rows, K, 0.0), solution.ok
