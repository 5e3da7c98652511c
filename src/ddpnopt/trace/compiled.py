"""`torch.compile`: code that was compiled before the hooks were there must not run in their place."""

from __future__ import annotations

import sys


def compiler_is_loaded() -> bool:
    return "torch._dynamo" in sys.modules


def let_compiled_code_see_hooks() -> None:
    """Compile again what has been compiled so far, and from now on again for modules with other hooks.

    Compiled code belongs to a class, not to an instance, and by default does not look whether hooks have been added.
    """
    if compiler_is_loaded():
        dynamo = sys.modules["torch._dynamo"]
        if getattr(dynamo.config, "skip_nnmodule_hook_guards", False):
            dynamo.config.skip_nnmodule_hook_guards = False
        dynamo.reset()
