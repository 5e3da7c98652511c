"""Where the time of a step goes: every moment is charged to the innermost function of this package that is running."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

import ddpnopt
from ddpnopt.lab.timing.steppers import Stepper

ROOT = str(Path(ddpnopt.__file__).parent)
PHASES = {"forward": "forward", "backward": "backward", "update": "step"}
Place = tuple[str, str]
"""The phase (forward, backward or step) and the function, as `module.function`."""


class Profile:
    """Records time while it is active; torch's own time is charged to the function that called it."""

    def __init__(self) -> None:
        self.seconds: dict[Place, float] = defaultdict(float)
        self._stack: list[Place] = []
        self._last = 0.0

    def __enter__(self) -> Profile:
        self._last = time.perf_counter()
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, _: Any) -> None:
        if event not in ("call", "return") or not frame.f_code.co_filename.startswith(ROOT):
            return
        now = time.perf_counter()
        if self._stack:
            self.seconds[self._stack[-1]] += now - self._last
        if event == "call":
            self._stack.append(self._place(frame))
        elif self._stack:
            self._stack.pop()
        self._last = time.perf_counter()

    def _place(self, frame: FrameType) -> Place:
        code = frame.f_code
        module = Path(code.co_filename).relative_to(ROOT).with_suffix("")
        if module.parts == ("lab", "timing", "steppers"):
            phase = PHASES.get(code.co_name, "loop")
            return phase, {"forward": "the network", "backward": "autograd"}.get(phase, phase)
        # A network of ours may run again within a step: that is the work of its caller.
        if module.parts[0] == "lab" and self._stack:
            return self._stack[-1]
        phase = self._stack[-1][0] if self._stack else "loop"
        # Comprehensions and lambdas have no meaningful names: they count for the function that contains them.
        if code.co_name.startswith("<") and self._stack:
            return self._stack[-1]
        return phase, f"{'.'.join(module.parts)}.{code.co_name}"


def profile(stepper: Stepper, steps: int) -> dict[Place, float]:
    """The share of each place in the time of a step, largest first."""
    stepper.step()
    with Profile() as found:
        for _ in range(steps):
            stepper.step()
    total = sum(found.seconds.values())
    shares = {place: seconds / total for place, seconds in found.seconds.items()}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))
