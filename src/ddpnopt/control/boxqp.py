"""A batch of small quadratic programmes with box constraints, by projected Newton (Tassa, Mansard, Todorov
2014).

    min over v of  1/2 v' H v + q' v    subject to  lower <= v <= upper

In box-DDP v is the open gain k_t, H = Q_uu, q = Q_u. At the solution the components split into clamped ones,
which the gradient presses against their limit, and free ones; the feedback gain acts on the free ones alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ARMIJO = 0.1
STEPS = 0.6 ** torch.arange(24, dtype=torch.float64)


@dataclass(frozen=True)
class BoxSolution:
    """v (B, m), which components are free (B, m), the Cholesky factor of H on the free ones (identity on the
    others), and whether H was positive definite there (B,)."""

    v: Tensor
    free: Tensor
    factor: Tensor
    ok: Tensor


def solve_box(H: Tensor, q: Tensor, lower: Tensor, upper: Tensor, *, iterations: int = 50) -> BoxSolution:
    """H (B, m, m), q, lower, upper (B, m). No loop over problems; those that are done stay as they are."""
    factor, ok = masked_factor(H, torch.ones_like(q, dtype=torch.bool))
    newton = -torch.cholesky_solve(q.unsqueeze(-1), factor).squeeze(-1)
    # The clipped Newton step is already the answer for one control, and nearly so for a few.
    v = torch.where(ok.unsqueeze(-1), newton, 0.0).clamp(lower, upper)
    steps = STEPS.to(q)[:, None, None]
    done = torch.zeros_like(ok)
    for _ in range(iterations):
        gradient = q + (H @ v.unsqueeze(-1)).squeeze(-1)
        free = ~(((v <= lower) & (gradient > 0)) | ((v >= upper) & (gradient < 0)))
        # Identity rows for the clamped components keep the batch rectangular.
        factor, ok = masked_factor(H, free)
        move = torch.where(free, -torch.cholesky_solve((gradient * free).unsqueeze(-1), factor).squeeze(-1), 0.0)
        slope = (gradient * move).sum(-1)  # (B,), negative unless solved
        size = (move.abs() / (1 + v.abs())).amax(-1)
        done = done | ~ok | (size <= 4 * torch.finfo(q.dtype).eps) | ~torch.isfinite(slope)
        if bool(done.all()):
            break
        trial = (v + steps * move).clamp(lower, upper)  # (A, B, m), all step sizes at once
        dv = trial - v
        change = (gradient * dv).sum(-1) + 0.5 * torch.einsum("abi,bij,abj->ab", dv, H, dv)
        good = change <= ARMIJO * (gradient * dv).sum(-1)
        first = good.to(torch.int8).argmax(0)  # largest acceptable step
        stuck = ~good.any(0)
        best = trial.gather(0, first[None, :, None].expand(1, -1, v.shape[-1])).squeeze(0)
        done = done | stuck
        v = torch.where(done.unsqueeze(-1), v, best)
    return BoxSolution(v, free, factor, ok)


def masked_factor(H: Tensor, free: Tensor) -> tuple[Tensor, Tensor]:
    """Cholesky factor of H on the free components, identity elsewhere; and whether there is one."""
    both = free.unsqueeze(-1) & free.unsqueeze(-2)
    eye = torch.eye(H.shape[-1], dtype=H.dtype, device=H.device)
    factor, info = torch.linalg.cholesky_ex(torch.where(both, H, eye))
    ok = info == 0
    return torch.where(ok[:, None, None], factor, eye), ok
