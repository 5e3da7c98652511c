"""Running second moments of features, and roots of their inverse that cost little to apply.

Small matrices are kept and decomposed as they are. Of large ones only the leading directions are followed, by a
randomised update (Halko, Martinsson and Tropp, 2011) of Q and E in C ~ Q E Q', so that nothing of the size n x n is
ever formed; the rest is a multiple of the identity, as if all other directions had their mean square:

    C^q ~ rest^q I + Q (E^q - rest^q) Q'
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddpnopt._distributed import Peers

LEADING = 64  # directions that are followed in large matrices
DENSE = 128  # features up to which the whole matrix is kept
MORE = 8  # random directions that are looked at besides the leading ones, so that new ones are found
CHANGED = 0.05  # relative change of a matrix from which on it is decomposed again


@dataclass(frozen=True)
class Root:
    """factor * (C + floor)^power, symmetric, for one side of a layer; `times` 2 is its square, -1 its inverse."""

    basis: Tensor | None  # (n, r) with r < n; None for the dense form
    levels: Tensor  # (r + 1,) of the basis, and of the rest; or the root itself, (n, n)
    square: Tensor | None = None  # of the dense form

    def times(self, a: Tensor, dim: int, times: int = 1) -> Tensor:
        """The root, its square or its inverse, applied to dimension `dim` of a."""
        if self.basis is None:
            matrix = self._matrix(times).to(a.dtype)
            if dim in (-1, a.dim() - 1):
                return a @ matrix
            if dim == 0:
                return (matrix @ a.flatten(1)).view(a.shape)
            if dim == 1 and a.dim() > 2:  # channels first
                return torch.matmul(matrix, a.flatten(2)).view(a.shape)
            return (a.movedim(dim, -1) @ matrix).movedim(-1, dim)
        levels = self.levels if times == 1 else self.levels**times
        basis, rest = self.basis.to(a.dtype), levels[-1].to(a.dtype)
        inside = (levels[:-1] - levels[-1]).to(a.dtype)
        last = a if dim in (-1, a.dim() - 1) else a.movedim(dim, -1)
        return torch.addcmul(((last @ basis) * inside) @ basis.T, last, rest).movedim(-1, dim)

    def _matrix(self, times: int) -> Tensor:
        if times == 1:
            return self.levels
        if times == 2:
            return self.levels @ self.levels if self.square is None else self.square
        return torch.linalg.inv(self.levels)

    def scaled(self, factor: float) -> tuple[Tensor | None, Tensor, Tensor | None]:
        """The fields of this root times a factor."""
        levels = self.levels * factor
        return self.basis, levels, levels @ levels if self.basis is None else None

    @property
    def mean_square(self) -> float:
        """The mean of the diagonal of the square."""
        if self.basis is None:
            return float(self.levels.square().sum()) / len(self.levels)
        n, r = self.basis.shape
        return float(self.levels[:-1].square().sum() + (n - r) * self.levels[-1].square()) / n


def observe(a: Tensor, dim: int, state: dict[str, Any], side: str, decay: float, peers: Peers) -> float:
    """Take the features of a, along `dim`, into the running second moments, each batch divided by its mean square.

    Returns that mean square. `state[side + "_moments"]`, or basis and levels, are sums with the weights of a running
    average.
    """
    kept = dim % a.dim()
    n = a.shape[kept]
    rows = (a if kept == a.dim() - 1 else a.movedim(kept, -1)).reshape(-1, n)
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))  # half precision has no decompositions
    share = 1.0 / max(1, len(rows)) * (1.0 if peers.alone else peers.share(len(a)))
    if n <= DENSE:
        C = _sum(rows.T @ rows * share, peers)
        mean = max(float(C.diagonal().mean()), torch.finfo(C.dtype).tiny)
        old = state.get(side + "_moments")
        new = C.mul_((1 - decay) / mean)
        state[side + "_moments"] = new if old is None else new.add_(old, alpha=decay)
        return mean
    mean = max(float(_sum(rows.square().sum()[None] * share, peers)) / n, torch.finfo(rows.dtype).tiny)
    _follow(rows, share * (1 - decay) / mean, decay, state, side, peers)
    return mean


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


def root(state: dict[str, Any], side: str, weight: float, floor: float, power: float) -> Root:
    """(C + floor)^power of the running average, C the moments divided by `weight`."""
    moments = state.get(side + "_moments")
    if moments is None:
        basis, values = state[side + "_basis"], state[side + "_values"] / weight
        n, r = basis.shape
        rest = ((n - values.sum()) / (n - r)).clamp_min(0)  # the mean of all levels is 1
        return Root(basis, (torch.cat([values, rest[None]]) + floor) ** power)
    used, current = state.get(side + "_used"), moments / weight
    if used is None or float(torch.dist(current, used)) > CHANGED * float(torch.linalg.matrix_norm(used)):
        values, Q = torch.linalg.eigh(current)
        state[side + "_used"] = current
        state[side + "_dense"] = (Q * (values.clamp_min(0) + floor) ** power) @ Q.T
    found: Tensor = state[side + "_dense"]
    return Root(None, found)


def _sum(a: Tensor, peers: Peers) -> Tensor:
    return a if peers.alone else peers.sum([a])[0]
