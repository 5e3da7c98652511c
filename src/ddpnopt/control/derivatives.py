"""Derivatives of dynamics and costs along a trajectory, at all stages of a run and all problems in one vmap
call.

State and control are joined to z = (x, u), so that the five derivatives of Eq. (3) are two: f_z = (f_x, f_u)
and f_zz, and the sweep's Q_x, Q_u, Q_xx, Q_ux, Q_uu are slices of Q_z and Q_zz.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, vmap

from .problem import Problem, StageFunction
from .stages import Blocks, Run, Trajectory, over_batch, select

# f_zz of a run is kept whole below this many numbers. Above, V_x . f_zz is formed stage by stage in the
# sweep: n_{t+1} times less memory, but one call per stage. 2^24 doubles are 128 MB.
TENSOR_BUDGET = 2**24

Contraction = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Expansion:
    """Derivatives along a trajectory, blocks over runs, nz = n + m."""

    f_z: Blocks  # (S, B, n_next, nz)
    f_zz: tuple[Tensor | None, ...]  # (S, B, n_next, nz, nz), or None: contract in the sweep, or iLQR
    l_z: Blocks  # (S, B, nz)
    l_zz: Blocks  # (S, B, nz, nz)
    phi_x: Tensor  # (B, n_T)
    phi_xx: Tensor  # (B, n_T, n_T)
    z: Blocks  # (S, B, nz): where the derivatives were taken
    second_order: bool

    def select(self, index: Tensor) -> Expansion:
        """Keep the problems in `index`."""
        return Expansion(
            select(self.f_z, index),
            tuple(None if block is None else block.index_select(1, index) for block in self.f_zz),
            select(self.l_z, index),
            select(self.l_zz, index),
            self.phi_x[index],
            self.phi_xx[index],
            select(self.z, index),
            self.second_order,
        )


def expand(problem: Problem, runs: Sequence[Run], trajectory: Trajectory, *, second_order: bool) -> Expansion:
    """All derivatives the backward sweep needs: with the tensors f_zz for DDP, without for iLQR."""
    f_z, l_z, l_zz, zs = [], [], [], []
    f_zz: list[Tensor | None] = []
    for run, x, u in zip(runs, trajectory.x, trajectory.u, strict=False):
        z = torch.cat([x, u], dim=-1)  # (S, B, nz)
        F, L = joined(run.f, run.n), joined(run.l, run.n)
        nz = run.n + run.m
        if second_order and z.numel() * run.n_next * nz <= TENSOR_BUDGET:
            tensor, jacobian = _both(jacrev(F), z)
            f_zz.append(tensor)
            f_z.append(jacobian)
        else:
            f_z.append(over_batch(jacrev(F), z))
            f_zz.append(None)
        matrix, vector = _both(grad(L), z)
        l_zz.append(matrix)
        l_z.append(vector)
        zs.append(z)
    x_T = trajectory.x[-1][0]
    phi_x, phi_xx = vmap(grad(problem.terminal_cost))(x_T), vmap(hessian(problem.terminal_cost))(x_T)
    return Expansion(tuple(f_z), tuple(f_zz), tuple(l_z), tuple(l_zz), phi_x, phi_xx, tuple(zs), second_order)


def contractions(expansion: Expansion, runs: Sequence[Run]) -> list[Contraction | None]:
    """For each stage the map V_x (B, n_next) -> V_x . f_zz (B, nz, nz) of Eq. (3); None for iLQR."""
    stages: list[Contraction | None] = []
    for run, z, tensor in zip(runs, expansion.z, expansion.f_zz, strict=True):
        for s in range(run.length):
            if not expansion.second_order:
                stages.append(None)
            elif tensor is not None:
                stages.append(_contract_kept(tensor[s]))
            else:
                stages.append(_contract_on_the_fly(joined(run.f, run.n), z[s]))
    return stages


def joined(function: StageFunction, n: int) -> Callable[[Tensor], Tensor]:
    """The function of z = (x, u)."""
    return lambda z: function(z[:n], z[n:])


def _both(first: Callable[[Tensor], Tensor], z: Tensor) -> tuple[Tensor, Tensor]:
    """Derivative and value of `first` at z (S, B, nz); one pass gives both."""

    def value_twice(z: Tensor) -> tuple[Tensor, Tensor]:
        value = first(z)
        return value, value

    derivative, value = vmap(jacfwd(value_twice, has_aux=True))(z.flatten(0, 1))
    return derivative.reshape(*z.shape[:2], *derivative.shape[1:]), value.reshape(*z.shape[:2], *value.shape[1:])


def _contract_kept(tensor: Tensor) -> Contraction:
    B, n_next, nz, _ = tensor.shape
    flat = tensor.reshape(B, n_next, nz * nz)
    return lambda V_x: torch.bmm(V_x.unsqueeze(1), flat).reshape(B, nz, nz)


def _contract_on_the_fly(F: Callable[[Tensor], Tensor], z: Tensor) -> Contraction:
    def weighted(z: Tensor, V_x: Tensor) -> Tensor:
        return torch.dot(V_x, F(z))

    return lambda V_x: vmap(hessian(weighted))(z, V_x)
