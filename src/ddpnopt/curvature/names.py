"""The curvatures by name."""

from __future__ import annotations

from collections.abc import Callable

from ddpnopt.curvature.base import Curvature
from ddpnopt.curvature.diagonal import Adam, Identity, RMSprop
from ddpnopt.curvature.kronecker import EKFAC, KFAC
from ddpnopt.errors import OptionError

CURVATURES: dict[str, Callable[..., Curvature]] = {
    "identity": Identity,
    "rmsprop": RMSprop,
    "adam": Adam,
    "kfac": KFAC,
    "ekfac": EKFAC,
}


def curvature_of(option: str | Curvature) -> Curvature:
    """The curvature of this name with its default settings, or the object itself."""
    if isinstance(option, str) and option in CURVATURES:
        return CURVATURES[option]()
    if isinstance(option, str) or not isinstance(option, Curvature):
        names = ", ".join(repr(name) for name in CURVATURES)
        raise OptionError(f"curvature={option!r} must be one of {names}, or implement `ddpnopt.Curvature`.")
    return option
