"""All cases, in one place."""

from __future__ import annotations

import cases_loops
import cases_more_strangers
import cases_packages
import cases_passes
import cases_several_fields
import cases_shapes
import cases_strangers
import cases_transformers
from trial import CASES

MODULES = (
    cases_transformers,
    cases_packages,
    cases_passes,
    cases_loops,
    cases_shapes,
    cases_strangers,
    cases_more_strangers,
    cases_several_fields,
)
GROUPS = list(dict.fromkeys(entry.group for entry in CASES.values()))

__all__ = ["CASES", "GROUPS", "MODULES"]
