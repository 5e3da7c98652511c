"""The options of the optimizer that are not given, and those that have no effect."""

from __future__ import annotations

from typing import Any

from ddpnopt.errors import OptionError

DEFAULT_LR = 3.0  # of value="batch": 1 / damping. Found over five tasks, see docs/method.md
DEFAULTS: dict[str, Any] = {
    "closed_loop": True, "relax": 1.0, "relax_samples": 6400.0, "dof": 0.25, "guard": True, "order": 1, "vxx_reg": 0.0,
}  # fmt: skip
"""Values of options that are not given, where they apply."""
NOT_GIVEN: Any = type("NotGiven", (), {"__repr__": lambda self: "NOT_GIVEN"})()
"""The default of an option for which None is a value of its own."""


def refuse(options: dict[str, Any], form: str) -> None:
    """Raise an error for an option that is given but has no effect with the chosen form."""
    for name, value in options.items():
        given = value is not NOT_GIVEN if name == "relax_samples" else value is not None
        if given:
            raise OptionError(f"{name}={value!r} has no effect with {form}. Leave {name} out.")


def refuse_without_effect(
    value: str,
    feedback: bool,
    coupled: dict[str, Any],
    full: dict[str, Any],
    closed: dict[str, Any],
    alone: dict[str, Any],
) -> None:
    """Raise an error for options of other forms: those of value="batch", of "full", of feedback, of samples alone."""
    if not feedback:
        refuse({**coupled, **alone, **full, **closed}, "feedback=False, which is the base optimizer alone")
    if value != "batch":
        refuse(coupled, f"value='{value}': it needs value='batch'")
    if value != "full":
        refuse(full, f"value='{value}': it needs value='full'")
    if value == "batch":
        refuse(alone, "value='batch', whose gains are bounded: it needs value='outer' or 'full'")
