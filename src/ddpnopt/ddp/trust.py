"""Experimental."""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass

from ddpnopt.ddp.value.joint import Planned


@dataclass
class Trust:
    damping: float = 1.0
    steps: int = 0
    loss: float = 0.0
    after: float = 0.0
    unseen: float = 0.0
    decrease: float = 0.0
    batch: float = 0.0  # fingerprint
    rejected: int = 0
    memory: float = 0.0
    act: float = 0.0
    prd: float = 0.0

    def judge(self, loss: float, slope: float | None, batch: float) -> float | None:
        """None: go on; otherwise the factor of the last step that remains."""
        if self.steps == 0:
            return None
        same = batch == self.batch
        if not loss <= self.loss * (1.0 if same else 2.0):
            self.damping *= 4
            self.rejected += 1
            return 0.25
        rule = os.environ.get("RULE", "gain")
        if same:
            rho = (self.loss - loss) / max(self.loss - self.after, 1e-300)
            if rho > 0.75:
                self.damping = max(self.damping / 3, 1e-12)
            elif rho < 0.25:
                self.damping *= 2
        elif rule == "gain":
            self.act = 0.9 * self.act + 0.1 * (self.loss - loss)
            self.prd = 0.9 * self.prd + 0.1 * max(self.loss - self.unseen, 0.0)
            rho = self.act / max(self.prd, 1e-300)
            if rho > 0.75:
                self.damping = max(self.damping / 1.5, 1e-12)
            elif rho < 0.25:
                self.damping *= 1.5
        self.memory = float(os.environ.get("MEM", "0")) 
        return None

    def remember(self, planned: Planned, batch: float) -> None:
        self.steps += 1
        self.loss, self.after, self.unseen, self.decrease = planned.loss, planned.after, planned.unseen, planned.decrease
        self.batch = batch

    def state(self) -> dict[str, float]:
        """For a checkpoint: plain numbers."""
        return asdict(self)
