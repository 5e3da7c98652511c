"""Everything that is not the optimizer: data, networks, runs, baselines, timing, the paper, its page, the commands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddpnopt.lab.comparison.own import compare

__all__ = ["compare"]


def __getattr__(name: str) -> Any:
    """`compare` is imported when it is asked for: it needs pandas, which most parts do not."""
    if name == "compare":
        from ddpnopt.lab.comparison.own import compare

        return compare
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
