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
from ddpnopt.linear.eigen import eigh
from ddpnopt.linear.layer import in_precision

LEADING = 32  # directions that are followed in large matrices
DENSE = 128  # features up to which the whole matrix is kept
MORE = 8  # random directions that are looked at besides the leading ones, so that new ones are found
CHANGED = 0.05  # relative change of a matrix from which on it is decomposed again


class Root:
    """factor (C + floor)^power, symmetric, for one side of a layer; `times` 2 is its square, -1 its inverse.

    `kept` is what a checkpoint has of it: "levels" in a "basis", (n,) and (n, n), or (r + 1,) and (n, r), the last one
    being that of the rest; the "factor"; a "seed"; and under 1, 2, -1 and "sketch" what was computed from these.
    """

    def __init__(self, kept: dict[Any, Any]) -> None:
        self.kept = kept
        n, r = kept["basis"].shape
        self.dense = n == r

    def power(self, times: int) -> Any:
        """The matrix, or the levels in the basis, less that of the rest, and of the rest."""
        found = self.kept.get(times)
        if found is None:
            levels, basis, factor = self.kept["levels"], self.kept["basis"], self.kept["factor"]
            if self.dense and times == 2:  # what every step needs, in few calls
                found = self.kept[2] = basis.new_empty(basis.shape)
                square_into([found], [self.kept])
                return found
            levels = (levels if times == 1 else levels**times) * factor**times
            found = (basis * levels) @ basis.T if self.dense else [levels[:-1] - levels[-1], levels[-1]]
            self.kept[times] = found
        return found

    def with_factor(self, factor: float) -> Root:
        """The same with another factor."""
        kept: dict[Any, Any] = {"levels": self.kept["levels"], "basis": self.kept["basis"], "factor": factor}
        ratio = factor / self.kept["factor"]
        for times in POWERS if self.dense else ():
            if times in self.kept:
                kept[times] = self.kept[times] * ratio**times
        return Root(kept)

    def times(self, a: Tensor, dim: int, times: int = 1) -> Tensor:
        """The root, its square or its inverse, applied to dimension `dim` of a; the layout in memory stays."""
        last = dim in (-1, a.dim() - 1)
        if self.dense:
            matrix = self.kept.get(times)
            matrix = self.power(times) if matrix is None else matrix
            if matrix.dtype != a.dtype:
                matrix = matrix.to(a.dtype)
            if last:
                return a @ matrix
            if _is_inner(a, dim):
                return (a.movedim(dim, -1) @ matrix).movedim(-1, dim)
            return _left(matrix, _as_columns(a, dim)).view(a.shape)
        inside, rest = (in_precision(levels, a.dtype) for levels in self.power(times))
        basis = in_precision(self.kept["basis"], a.dtype)
        if last or _is_inner(a, dim):
            moved = a if last else a.movedim(dim, -1)
            found = (((moved @ basis) * inside) @ basis.T).addcmul_(moved, rest)
            return found if last else found.movedim(-1, dim)
        columns = _as_columns(a, dim)
        found = _left(basis * inside, _left(basis.T, columns))
        return found.addcmul_(columns, rest).view(a.shape)

    def inside(self, a: Tensor, combined: Tensor) -> Tensor:
        """The rows of a, (B, n), in the basis, (B, r), of which their `sketch`, (B, k), may have all but the scale."""
        basis = in_precision(self.kept["basis"], a.dtype)
        r = basis.shape[1]
        if self.dense or combined.shape[1] < 2 * r:
            return a @ basis
        return combined[:, :r] / in_precision(self.kept["levels"][:-1] * self.kept["factor"], a.dtype)

    def squares(self, a: Tensor, inside: Tensor) -> Tensor:
        """|R a|^2 of the rows of a, (B,), which are `inside` in the basis."""
        if self.dense:
            levels = in_precision(self.kept["levels"] * self.kept["factor"], a.dtype)
            return torch.linalg.vector_norm(inside * levels, dim=1).square_()
        weights, rest = (in_precision(levels, a.dtype) for levels in self.power(2))
        squares = torch.linalg.vector_norm(a, dim=1).square_().mul_(rest)
        return squares.add_(torch.linalg.vecdot(inside, inside * weights))

    def squared(self, a: Tensor, inside: Tensor) -> Tensor:
        """The square of the root applied to the rows of a, which are `inside` in the basis."""
        if self.dense:
            return self.times(a, -1, 2)
        weights, rest = (in_precision(levels, a.dtype) for levels in self.power(2))
        return ((inside * weights) @ in_precision(self.kept["basis"], a.dtype).T).addcmul_(a, rest)

    def apart(self, a: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        """a in the directions of the root, moved to the end, and the square of the root in each of them.

        Those of the basis come first, then, of a large matrix, all features with what the basis leaves of them.
        """
        basis, moved = in_precision(self.kept["basis"], a.dtype), a.movedim(dim, -1)
        squares = in_precision((self.kept["levels"] * self.kept["factor"]).square(), a.dtype)
        inside = moved @ basis
        if self.dense:
            return inside, squares
        rest = squares[-1:].expand(len(basis))
        return torch.cat([inside, moved - inside @ basis.T], -1), torch.cat([squares[:-1], rest])

    def together(self, a: Tensor, dim: int) -> Tensor:
        """Back from `apart`."""
        basis = in_precision(self.kept["basis"], a.dtype)
        r = basis.shape[1]
        found = a[..., :r] @ basis.T
        return (found if self.dense else found + a[..., r:]).movedim(-1, dim)

    def sketch(self, a: Tensor, dim: int, k: int, *, inverse: bool = False) -> Tensor:
        """k combinations of the features that the root, or its inverse, gives: Omega' R a, along dimension `dim`.

        Omega Omega' is the identity on average, so inner products are kept; exactly those in the leading directions of
        C, which are half of the combinations. The other half are random directions of what is left.
        """
        pair = self.kept.get("sketch")
        if pair is None or pair[0].shape[1] != k:
            pair = self.kept["sketch"] = self._combinations(k)
        matrix = in_precision(pair[inverse], a.dtype)  # (n, k)
        if dim in (-1, a.dim() - 1):
            return a @ matrix
        if _is_inner(a, dim):
            if a.stride(dim) == 1 and dim % a.dim() == 1 and a.dim() == 4 and a.shape[2] * a.shape[3] >= NARROW:
                # channels last in memory: products with few rows are faster than one with few columns
                return _left(matrix.T, a.flatten(2)).view(len(a), k, *a.shape[2:])
            return (a.movedim(dim, -1) @ matrix).movedim(-1, dim)
        return _left(matrix.T, _as_columns(a, dim)).view(*a.shape[:dim], k, *a.shape[dim:][1:])

    def _combinations(self, k: int) -> list[Tensor]:
        """R Omega and R^-1 Omega, both through the basis: the roots themselves need not be formed."""
        basis, levels, factor = self.kept["basis"], self.kept["levels"], self.kept["factor"]
        n, r = basis.shape
        lead = min(k // 2, r)
        generator = torch.Generator().manual_seed(self.kept.get("seed", 0))
        Z = torch.randn(n, k - lead, generator=generator).to(basis) / (k - lead) ** 0.5
        Q, part = basis[:, r - lead :], basis.T @ Z  # the last of the basis have the largest moments
        found = []
        for power in (1, -1):
            own = levels * factor if power == 1 else 1 / (levels * factor)
            inside = own.clone() if self.dense else own[:-1] / own[-1] - 1
            inside[r - lead :] = 0 if self.dense else -1  # no part of the leading directions in the others
            others = basis @ (part * inside[:, None])
            others = others if self.dense else (others + Z) * own[-1]
            found.append(torch.cat([Q * own[r - lead : r], others], 1))
        return found

    def isometric(self, a: Tensor) -> Tensor:
        """Numbers with the inner products of the root applied to a, along the last dimension."""
        if not self.dense:
            return self.times(a, -1)
        return (a @ in_precision(self.kept["basis"], a.dtype)).mul_(
            in_precision(self.kept["levels"], a.dtype) * self.kept["factor"]
        )

    def change_from(self, before: Root) -> float:
        """By how much the square of a large root differs from that of another one, relative to it; without factors."""
        Q, P, new, old = self.kept["basis"], before.kept["basis"], self.kept["levels"], before.kept["levels"]
        if self.dense or Q.shape != P.shape:
            return math.inf
        new, old = new.square(), old.to(new).square()
        a, b = new[:-1] - new[-1], old[:-1] - old[-1]  # the squares are rest I + Q a Q' and rest I + P b P'
        both = torch.vdot(a @ (Q.T @ P.to(Q)).square_(), b)
        sums = torch.stack([new[-1], old[-1], a.sum(), b.sum(), torch.vdot(a, a), torch.vdot(b, b), both])
        x, y, of_a, of_b, a2, b2, ab = sums.tolist()
        n = len(Q)
        square = n * (x - y) ** 2 + 2 * (x - y) * (of_a - of_b) + a2 + b2 - 2 * ab
        return math.sqrt(max(0.0, square) / (n * y * y + 2 * y * of_b + b2))

    @property
    def mean_square(self) -> float:
        """The mean of the diagonal of the square."""
        n, r = self.kept["basis"].shape
        squares = self.kept["levels"].square() * self.kept["factor"] ** 2
        return float(squares.mean()) if self.dense else float(squares[:-1].sum() + (n - r) * squares[-1]) / n


def square_into(places: list[Tensor], roots: list[dict[Any, Any]]) -> None:
    """Compute the squares of small roots, as `Root` keeps them, there."""
    halves = torch._foreach_mul([kept["basis"] for kept in roots], [kept["levels"] for kept in roots])
    for place, half, kept in zip(places, halves, roots, strict=True):
        half = in_precision(half, place.dtype)
        place.addmm_(half, half.T, beta=0, alpha=kept["factor"] ** 2)


POWERS = (1, 2, -1)
NARROW = 16  # numbers behind a feature below which many small products take longer than a copy and a large one


def _is_inner(a: Tensor, dim: int) -> bool:
    """Whether to move a dimension to the end: it is there in memory (channels last), or little is behind it."""
    return a.stride(dim) == 1 or (dim % a.dim() > 0 and math.prod(a.shape[dim % a.dim() + 1 :]) < NARROW)


def _as_columns(a: Tensor, dim: int) -> Tensor:
    """(n, others), or (others before, n, others behind), without a copy if a is contiguous."""
    dim %= a.dim()
    if dim == 0:
        return a.reshape(len(a), -1)
    return a.reshape(math.prod(a.shape[:dim]), a.shape[dim], -1)


def _left(matrix: Tensor, columns: Tensor) -> Tensor:
    """matrix @ columns; `torch.matmul` would transpose three dimensions into two, which takes longer."""
    return matrix @ columns if columns.dim() == 2 else torch.bmm(matrix.expand(len(columns), -1, -1), columns)


def observe(a: Tensor, dim: int, state: dict[str, Any], side: str, decay: float, peers: Peers) -> None:
    """Take the features of a, along `dim`, into the running second moments, each batch divided by its mean square.

    A batch in which that is zero or not finite changes nothing. `state[side + "_moments"]`, or basis and values, are
    sums with the weights of a running average, whose sum is `state[side + "_weight"]`.
    """
    kept = dim % a.dim()
    n = a.shape[kept]
    a = a if a.dtype.itemsize >= 4 else a.float()  # to be decomposed
    share = n / max(1, a.numel())  # of each place
    dense = n <= DENSE
    rows = None if dense and _is_outer(a, kept) else _rows(a, kept)
    square, info = float(torch.linalg.vector_norm(a if rows is None else rows)) ** 2, torch.finfo(a.dtype)
    mean = share * square / n if square <= info.max else math.inf
    of_process = 1.0 if peers.alone else peers.share(len(a))
    mean = mean if peers.alone else peers.total(mean * of_process)
    if not info.tiny <= mean < math.inf:
        return
    share *= of_process * (1 - decay) / mean
    if not dense:
        assert rows is not None
        _follow(rows, share, decay, state, side, peers)
    else:
        old = in_precision(state.get(side + "_moments"), a.dtype)
        if rows is not None and old is not None and peers.alone:
            state[side + "_moments"] = torch.addmm(old, rows.T, rows, beta=decay, alpha=share)
        else:
            new = (_products(a.flatten(2)) if rows is None else rows.T @ rows).mul_(share)
            new = new if peers.alone else peers.sum([new])[0]
            state[side + "_moments"] = new if old is None else new.add_(old, alpha=decay)
    note_scale(state, side, mean, decay)


def _rows(a: Tensor, dim: int) -> Tensor:
    """(places, n), the features of all places."""
    if a.dim() == 2 and dim == 1:
        return a
    return (a if dim == a.dim() - 1 else a.movedim(dim, -1)).reshape(-1, a.shape[dim])


def _is_outer(a: Tensor, dim: int) -> bool:
    """Whether the places of a are behind its features in memory, and many: products without a transposed copy."""
    return dim == 1 < a.dim() - 1 and a.stride(1) != 1 and math.prod(a.shape[2:]) >= a.shape[1]


def _products(columns: Tensor) -> Tensor:
    """The sum over all places of products of two features: (B, n, places) -> (n, n)."""
    return torch.bmm(columns, columns.mT).sum(0)


def _follow(rows: Tensor, share: float, decay: float, state: dict[str, Any], side: str, peers: Peers) -> None:
    """One randomised update of the leading directions of decay Q E Q' + share rows' rows."""
    n = rows.shape[1]
    Q, E = (in_precision(state.get(side + name), rows.dtype) for name in ("_basis", "_values"))
    looks = state[side + "_looks"] = state.get(side + "_looks", 0) + 1
    generator = torch.Generator().manual_seed(looks)
    r = min(LEADING, n - 1)
    random = torch.randn(n, MORE if Q is not None else r + MORE, generator=generator).to(rows)
    test = random if Q is None else torch.cat([Q, random], 1)
    Y = rows.T @ (rows @ test) * share
    Y = Y if peers.alone else peers.sum([Y])[0]
    if Q is not None and E is not None:
        Y.addmm_(Q * (decay * E), Q.T @ test)
    Z = torch.linalg.qr(Y)[0]
    seen = rows @ Z
    H = seen.T @ seen * share
    H = H if peers.alone else peers.sum([H])[0]
    if Q is not None and E is not None:
        inside = Q.T @ Z
        H.addmm_(inside.T * (decay * E), inside)
    E, V = eigh(H)
    state[side + "_values"], state[side + "_basis"] = E[-r:].clamp_min(0), Z @ V[:, -r:]


def note_scale(state: dict[str, Any], side: str, mean: float, decay: float) -> None:
    """Take the mean square of a batch into the running average."""
    state[side + "_weight"] = decay * state.get(side + "_weight", 0.0) + 1 - decay
    if 0 < mean < math.inf:
        state[side + "_log_scale"] = decay * state.get(side + "_log_scale", 0.0) + (1 - decay) * math.log(mean)


def scale(state: dict[str, Any], side: str) -> float:
    """The root mean square of all features, the geometric mean over the batches."""
    return math.exp(0.5 * state[side + "_log_scale"] / state[side + "_weight"]) if side + "_log_scale" in state else 1.0


def root(
    state: dict[str, Any], side: str, like: Tensor, n: int, floor: float, power: float, factor: float
) -> tuple[Root, float]:
    """The root factor (C + floor)^power of the running average C of n features, in the precision of `like` at least.

    And by how much its square has changed since it was last computed: of a small matrix about 2 |power| times as much
    as C.
    """
    if side + "_weight" not in state:  # nothing but zeros so far
        wide = torch.promote_types(like.dtype, torch.float32)
        one = torch.eye(n, dtype=wide, device=like.device)
        return Root({"levels": one.diagonal().clone(), "basis": one, "factor": factor}), math.inf
    weight = state[side + "_weight"]
    moments = state.get(side + "_moments")
    if moments is None:
        basis, values = state[side + "_basis"], state[side + "_values"] / weight
        r = basis.shape[1]
        rest = ((n - values.sum()) / (n - r)).clamp_min(0)  # the mean of all levels is 1
        found = Root({"levels": (torch.cat([values, rest[None]]) + floor) ** power, "basis": basis, "factor": factor})
        before = state.get(side + "_root")
        return found, math.inf if before is None else found.change_from(Root(before))
    used, current = in_precision(state.get(side + "_used"), moments.dtype), moments / weight
    change = math.inf if used is None else float(torch.dist(current, used)) / state[side + "_norm"]
    if change <= CHANGED:
        return Root(state[side + "_root"]).with_factor(factor), 0.0
    values, Q = eigh(current)
    state[side + "_used"], state[side + "_norm"] = current, math.hypot(*values.tolist())
    levels = values.clamp_min_(0).add_(floor).pow_(power)
    return Root({"levels": levels, "basis": Q, "factor": factor}), 2 * abs(power) * change
