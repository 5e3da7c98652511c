"""The inverse of the curvature, M^-1, in the one form that all curvatures of Table 2 share.

    M^-1 = (T_A (x) T_G)' diag(D) (T_A (x) T_G),        M^-1 U = T_G' (D o (T_G U T_A')) T_A

on the joint form U: (g, O, J). Identity: nothing. Adaptive diagonal: D. KFAC: T_A, T_G whiten. EKFAC: T_A, T_G rotate
into the Kronecker eigenbasis and D scales there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from ddpnopt.linear.layer import Layer, Parts


@dataclass(frozen=True)
class Metric:
    """M^-1 of one layer. All None is the identity."""

    T_A: Tensor | None = None  # (g, J, J)
    T_G: Tensor | None = None  # (g, O, O)
    D: Parts | None = None  # like [W, b] without T_A and T_G, else [(g, O, J)]
    inverse: tuple[Tensor, Tensor] | None = None  # T_A' T_A and T_G' T_G instead, where only `solve` is needed

    is_identity: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_identity", self.T_A is None and self.D is None and self.inverse is None)

    def diagonal(self, layer: Layer) -> Tensor | None:
        """D in the joint form (g, O, J)."""
        if self.D is None or self.T_A is not None:
            return None if self.D is None else self.D[0]
        return layer.join(self.D)

    def solve(self, layer: Layer | None, u: Parts) -> Parts:
        """M^-1 u. Without a layer (parameters without feedback) only the diagonal forms apply."""
        if self.inverse is not None:
            assert layer is not None
            return layer.split(_between(self.inverse[1], layer.join(u), self.inverse[0]))
        if self.T_A is None or self.T_G is None:
            return u if self.D is None else [a * d for a, d in zip(u, self.D, strict=True)]
        assert layer is not None
        joint = _between(self.T_G, layer.join(u), self.T_A.mT)
        if self.D is not None:
            joint = joint * self.D[0]
        return layer.split(_between(self.T_G.mT, joint, self.T_A))

    def columns(self, x: Tensor) -> Tensor:
        """T_A x~ for inputs in column form (…, g, J)."""
        return x if self.T_A is None else _transform(self.T_A, x)

    def rows(self, v: Tensor) -> Tensor:
        """T_G v for outputs in column form (…, g, O)."""
        return v if self.T_G is None else _transform(self.T_G, v)


def _transform(T: Tensor, a: Tensor) -> Tensor:
    """T a of each group: (g, k, j), (…, g, j) -> (…, g, k)."""
    return F.linear(a, T[0]) if len(T) == 1 else torch.einsum("...gj,gkj->...gk", a, T)


def _between(left: Tensor, joint: Tensor, right: Tensor) -> Tensor:
    """Products of each group, (g, …); of one group as plain matrices, three times faster for small ones."""
    return (left[0] @ joint[0] @ right[0])[None] if len(joint) == 1 else left @ joint @ right


IDENTITY = Metric()
