"""Running second moments of features, and roots of their inverse that cost little to apply.

Small matrices are kept and decomposed as they are. Of large ones only the leading directions are followed, by a
randomised update (Halko, Martinsson and Tropp, 2011) of Q and E in C ~ Q E Q', so that nothing of the size n x n is
ever formed; the rest is a multiple of the identity, as if all other directions had their mean square:

    C^q ~ rest^q I + Q (E^q - rest^q) Q'
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ddpnopt._distributed import Peers

LEADING = 64  # directions that are followed in large matrices
DENSE = 128  # features up to which the whole matrix is kept
MORE = 8  # random directions that are looked at besides the leading ones, so that new ones are found
CHANGED = 0.05  # relative change of a matrix from which on it is decomposed again


class Root:
    """factor (C + floor)^power, symmetric, for one side of a layer; `times` 2 is its square, -1 its inverse.

    `parts` is the root and its square, (n, n), or its levels (r + 1,) in a basis (n, r) and in the rest.
    """

    def __init__(self, parts: list[Tensor]) -> None:
        self.levels, self.other = parts
        self.dense = self.levels.dim() == 2

    def times(self, a: Tensor, dim: int, times: int = 1) -> Tensor:
        """The root, its square or its inverse, applied to dimension `dim` of a."""
        last = dim in (-1, a.dim() - 1)
        if self.dense:
            matrix = self.levels if times == 1 else self.other if times == 2 else torch.linalg.inv(self.levels)
            matrix = matrix.to(a.dtype)
            if last:
                return a @ matrix
            if dim == 0:
                return (matrix @ a.flatten(1)).view(a.shape)
            if dim == 1:  # channels first
                return torch.matmul(matrix, a.flatten(2)).view(a.shape)
            return (a.movedim(dim, -1) @ matrix).movedim(-1, dim)
        levels = self.levels if times == 1 else self.levels**times
        basis, rest = self.other.to(a.dtype), levels[-1].to(a.dtype)
        inside = (levels[:-1] - levels[-1]).to(a.dtype)
        moved = a if last else a.movedim(dim, -1)
        return torch.addcmul(((moved @ basis) * inside) @ basis.T, moved, rest).movedim(-1, dim)

    @property
    def mean_square(self) -> float:
        """The mean of the diagonal of the square."""
        if self.dense:
            return float(self.other.diagonal().mean())
        n, r = self.other.shape
        squares = self.levels.square()
        return float(squares[:-1].sum() + (n - r) * squares[-1]) / n


def observe(a: Tensor, dim: int, state: dict[str, Any], side: str, decay: float, peers: Peers) -> None:
    """Take the features of a, along `dim`, into the running second moments, each batch divided by its mean square.

    A batch in which that is zero or not finite changes nothing. `state[side + "_moments"]`, or basis and values, are
    sums with the weights of a running average, whose sum is `state[side + "_weight"]`.
    """
    kept = dim % a.dim()
    n = a.shape[kept]
    rows = (a if kept == a.dim() - 1 else a.movedim(kept, -1)).reshape(-1, n)
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))  # half precision has no decompositions
    share = 1.0 / max(1, len(rows)) * (1.0 if peers.alone else peers.share(len(a)))
    if n <= DENSE:
        C = _sum(rows.T @ rows * share, peers)
        mean = float(C.diagonal().mean())
    else:
        mean = float(_sum(rows.square().sum()[None] * share, peers)) / n
    if not torch.finfo(rows.dtype).tiny <= mean < math.inf:
        return
    if n <= DENSE:
        old = state.get(side + "_moments")
        new = C.mul_((1 - decay) / mean)
        state[side + "_moments"] = new if old is None else new.add_(old, alpha=decay)
    else:
        _follow(rows, share * (1 - decay) / mean, decay, state, side, peers)
    note_scale(state, side, mean, decay)


def _follow(rows: Tensor, share: float, decay: float, state: dict[str, Any], side: str, peers: Peers) -> None:
    """One randomised update of the leading directions of decay Q E Q' + share rows' rows."""
    n = rows.shape[1]
    Q, E = state.get(side + "_basis"), state.get(side + "_values")
    looks = state[side + "_looks"] = state.get(side + "_looks", 0) + 1
    generator = torch.Generator().manual_seed(looks)
    r = min(LEADING, n - 1)
    random = torch.randn(n, MORE if Q is not None else r + MORE, generator=generator).to(rows)
    test = random if Q is None else torch.cat([Q, random], 1)

    def moments(X: Tensor) -> Tensor:
        new = _sum(rows.T @ (rows @ X) * share, peers)
        return new if Q is None or E is None else new.addmm_(Q * (decay * E), Q.T @ X)

    Z = torch.linalg.qr(moments(test))[0]
    H = Z.T @ moments(Z)
    E, V = torch.linalg.eigh((H + H.T) / 2)
    state[side + "_values"], state[side + "_basis"] = E[-r:].clamp_min(0), Z @ V[:, -r:]


def note_scale(state: dict[str, Any], side: str, mean: float, decay: float) -> None:
    """Take the mean square of a batch into the running average."""
    state[side + "_weight"] = decay * state.get(side + "_weight", 0.0) + 1 - decay
    if 0 < mean < math.inf:
        state[side + "_log_scale"] = decay * state.get(side + "_log_scale", 0.0) + (1 - decay) * math.log(mean)


def scale(state: dict[str, Any], side: str) -> float:
    """The root mean square of all features, the geometric mean over the batches."""
    return math.exp(0.5 * state[side + "_log_scale"] / state[side + "_weight"]) if side + "_log_scale" in state else 1.0


def root(state: dict[str, Any], side: str, n: int, floor: float, power: float, factor: float = 1.0) -> list[Tensor]:
    """The parts of the root factor (C + floor)^power of the running average C of n features."""
    if side + "_weight" not in state:  # nothing but zeros so far
        return [torch.eye(n) * factor, torch.eye(n) * factor**2]
    weight = state[side + "_weight"]
    moments = state.get(side + "_moments")
    if moments is None:
        basis, values = state[side + "_basis"], state[side + "_values"] / weight
        r = basis.shape[1]
        rest = ((n - values.sum()) / (n - r)).clamp_min(0)  # the mean of all levels is 1
        return [factor * (torch.cat([values, rest[None]]) + floor) ** power, basis]
    used, current = state.get(side + "_used"), moments / weight
    if used is None or float(torch.dist(current, used)) > CHANGED * float(torch.linalg.matrix_norm(used)):
        values, Q = torch.linalg.eigh(current)
        state[side + "_used"] = current
        state[side + "_dense"] = (Q * (values.clamp_min(0) + floor) ** power) @ Q.T
    found = state[side + "_dense"] * factor
    return [found, found @ found]


def _sum(a: Tensor, peers: Peers) -> Tensor:
    return a if peers.alone else peers.sum([a])[0]
