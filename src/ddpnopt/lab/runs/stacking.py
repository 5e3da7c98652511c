"""Which runs are trained together as one stack, and which by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from ddpnopt.errors import NonFiniteError
from ddpnopt.lab.runs.config import RunConfig
from ddpnopt.lab.runs.outcome import Outcome
from ddpnopt.lab.runs.stacked.network import activations
from ddpnopt.lab.runs.stacked.recipe import classification, shared
from ddpnopt.lab.runs.stacked.training import outcomes
from ddpnopt.lab.runs.training import perform
from ddpnopt.lab.runs.work import SingleRun, WorkUnit

# More runs at once share more of Python's overhead; but what is finished together is also lost together by a kill, and
# beyond this number the tensors outgrow the processor's cache.
LARGEST_STACK = 40


@dataclass(frozen=True)
class StackedRuns:
    """Runs that fit into one stack."""

    runs: Sequence[RunConfig]

    def perform(self, data_dir: Path | None) -> list[Outcome | None]:
        tasks = [(run, classification(run)) for run in self.runs]
        problems = [task.problem(run.seed, validation=run.validation, data_dir=data_dir) for run, task in tasks]
        models = [problem.model for problem in problems]
        if activations(models[0]) is None:
            return [perform(run, data_dir) for run in self.runs]
        try:
            return list(outcomes(self.runs, models, [problem.dataset for problem in problems]))
        except (torch.linalg.LinAlgError, NonFiniteError):  # type: ignore[attr-defined]
            # one run's decomposition failed, and nothing says which: the half without it goes on as a stack
            if len(self.runs) == 1:
                return [perform(self.runs[0], data_dir)]
            middle = len(self.runs) // 2
            halves = StackedRuns(self.runs[:middle]), StackedRuns(self.runs[middle:])
            return [outcome for half in halves for outcome in half.perform(data_dir)]


def work_units(runs: Sequence[RunConfig], largest: int = LARGEST_STACK) -> list[WorkUnit]:
    """Stacks of at most `largest` runs, and the other runs by themselves."""
    stacks: dict[str, list[RunConfig]] = {}
    made: list[WorkUnit] = []
    for run in runs:
        kind = shared(run)
        if kind is None:
            made.append(SingleRun(run))
        else:
            stacks.setdefault(kind, []).append(run)
    for found in stacks.values():
        # even parts: forty-one are twenty and twenty-one, not forty and one
        parts = -(-len(found) // largest)
        ends = [round(len(found) * i / parts) for i in range(parts + 1)]
        made += [StackedRuns(found[a:b]) for a, b in pairwise(ends)]
    return made
