"""The one exception of `ddpnopt.control`."""

from __future__ import annotations


class ControlError(ValueError):
    """A problem, a start or an option that cannot be used. The message says what, where, and what to do."""
