"""Which runs are trained together in one program, and which by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from ddpnopt.errors import NonFiniteError
from ddpnopt.lab.networks import build
from ddpnopt.lab.runs.data import data_of
from ddpnopt.lab.runs.job import Training
from ddpnopt.lab.runs.outcome import Outcome
from ddpnopt.lab.runs.stacked.network import activations
from ddpnopt.lab.runs.stacked.recipe import shared
from ddpnopt.lab.runs.stacked.training import outcomes
from ddpnopt.lab.runs.work import Single, Unit

# More runs at once share more of Python's time; but what is finished together is also lost together by a kill, and
# beyond this the tensors outgrow the processor's cache.
MOST = 40


@dataclass(frozen=True)
class Together:
    """Runs that fit into one stack."""

    jobs: Sequence[Training]

    def perform(self, data_dir: Path | None) -> list[Outcome | None]:
        configs = [job.config for job in self.jobs]
        data = [data_of(config, data_dir) for config in configs]
        models = [build(c.network, each, c.seed) for c, each in zip(configs, data, strict=True)]
        if activations(models[0]) is None:
            return [job.perform(data_dir) for job in self.jobs]
        try:
            return list(outcomes(configs, models, data))
        except (torch.linalg.LinAlgError, NonFiniteError):  # type: ignore[attr-defined]
            # one run's decomposition failed, and nothing says whose: the half without it goes on as a stack
            if len(self.jobs) == 1:
                return [self.jobs[0].perform(data_dir)]
            middle = len(self.jobs) // 2
            halves = Together(self.jobs[:middle]), Together(self.jobs[middle:])
            return [outcome for half in halves for outcome in half.perform(data_dir)]


def units(jobs: Sequence[Training], most: int = MOST) -> list[Unit[Training]]:
    """The jobs in an order of units that is near theirs: stacks of at most `most`, the others by themselves."""
    stacks: dict[str, list[Training]] = {}
    made: list[Unit[Training]] = []
    for job in jobs:
        kind = shared(job.config)
        if kind is None:
            made.append(Single(job))
        else:
            stacks.setdefault(kind, []).append(job)
    for found in stacks.values():
        # even parts: forty-one are twenty and twenty-one, not forty and one
        parts = -(-len(found) // most)
        ends = [round(len(found) * i / parts) for i in range(parts + 1)]
        made += [Together(found[a:b]) for a, b in pairwise(ends)]
    return made
