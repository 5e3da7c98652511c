"""Products in bfloat16 on processors that announce AMX to programs and do not let them use it."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache

VARIABLE = "ONEDNN_MAX_CPU_ISA"
WITHOUT_AMX = "AVX512_CORE_BF16"
PROBE = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); x @ x"


@cache
def allow_bfloat16() -> None:
    """Switch AMX off for this process and those it starts, if a product in bfloat16 dies with an illegal instruction.

    oneDNN reads the variable before its first product, so this comes first. A value that is set already is kept.
    """
    if VARIABLE not in os.environ and subprocess.run([sys.executable, "-c", PROBE], check=False).returncode < 0:
        os.environ[VARIABLE] = WITHOUT_AMX
