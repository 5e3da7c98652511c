"""Methods from outside the registry, for experiments: `module:function`, a function from a model to an optimizer."""

from __future__ import annotations

import hashlib
import importlib
import inspect
from functools import cache

from ddpnopt.lab.errors import ExperimentError
from ddpnopt.lab.methods.method import Method


@cache
def imported_method(name: str) -> Method:
    """The method `module:function`; the module has to be importable, such as a file in a folder of PYTHONPATH."""
    module_name, _, function_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
        function = getattr(module, function_name)
        source = inspect.getsource(module)
    except (ImportError, AttributeError, OSError, TypeError, ValueError) as wrong:
        raise ExperimentError(f"method {name!r} cannot be imported: {wrong}") from wrong
    return Method(name, name, function, source=hashlib.sha256(source.encode()).hexdigest()[:12])
