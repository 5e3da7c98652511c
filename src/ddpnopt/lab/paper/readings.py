"""What the paper leaves open about V_xx, as named readings: each is a few options of `DDPNOpt`.

Algorithm 3 starts from the Hessian of a capital Phi and averages over the batch in line 10. Whether V_xx of a sample is
its Hessian H, or H over B, or over a higher power of B, is not said; nor what happens where 1 - s is negative, whether
V_xx is H or z z' (Proposition 2), and whether M is that of Q_u or of the whole direction. The items that train DIGITS
compare these readings; the claims are judged in `PAPER`, and `fig-grid` says whether it is the closest to the paper's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ddpnopt.lab.errors import UnknownNameError


@dataclass(frozen=True)
class Reading:
    """Options of DDPNOpt's `value="full"`, some of them for the adaptive diagonals only."""

    name: str
    label: str
    options: Mapping[str, Any] = field(hash=False)
    adaptive: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def options_of(self, method: str) -> dict[str, Any]:
        """The options for a method of the registry; none for a baseline."""
        if not method.startswith("ddpnopt-"):
            return {}
        adaptive = self.adaptive if method in ("ddpnopt-rmsprop", "ddpnopt-adam") else {}
        return {**self.options, **adaptive}


READINGS = {
    each.name: each
    for each in (
        Reading("mean", "H/B, guard", {"vxx_power": 1}),
        Reading("twice", "H/B^2, guard", {"vxx_power": 2}),
        Reading("outer", "z z', guard, M of the whole direction", {"terminal": "gn", "vxx_power": 2}, {"whole": True}),
        Reading("thrice", "H/B^3, no guard", {"vxx_power": 3, "guard": False}),
        Reading("thrice-guard", "H/B^3, guard", {"vxx_power": 3}),
        Reading("sample", "H, mean at the update, no guard", {"vxx_power": 0, "guard": False}),
    )
}
PAPER = "thrice-guard"
"""Chosen by the distance to the paper's training losses on seeds 0 to 3, not by what becomes of its claims."""

KRONECKER = {"damping": 0.1, "refresh": 100}
"""As in the example of EKFAC's public code, which the paper used."""


def reading(name: str) -> Reading:
    """The reading of this name, or an error that lists the names."""
    if name not in READINGS:
        raise UnknownNameError("reading", name, READINGS)
    return READINGS[name]


def options(method: str, chosen: Reading) -> dict[str, Any]:
    """All options of a run of the DIGITS items."""
    kronecker = KRONECKER if method in ("ekfac", "ddpnopt-ekfac") else {}
    return {**kronecker, **chosen.options_of(method)}
