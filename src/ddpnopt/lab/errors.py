"""Errors that the user can correct: reported as a message, not as a traceback."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class ExperimentError(ValueError):
    """A request that cannot be met; the message says which one and what to do."""


class UnknownNameError(ExperimentError):
    """A data set, network or method that does not exist."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        names = list(known)
        meant = get_close_matches(name, names, n=1)
        hint = f"did you mean {meant[0]!r}? " if meant else ""
        super().__init__(f"unknown {kind} {name!r}; {hint}known: {', '.join(names)}")


class DataError(ExperimentError):
    """A data set that is missing, damaged, or cannot be stored."""


class NotApplicableError(ExperimentError):
    """A method that cannot train a network of this kind."""


class NoDefaultRateError(ExperimentError):
    """A method without a default learning rate was asked to run at its default."""


class TaskError(ExperimentError):
    """A task of the user's own that does not fit, or that failed; the message names the function and the line."""
