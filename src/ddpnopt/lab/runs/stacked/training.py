"""A stack trained from start to end, each run with the data, weights and batches that it would have by itself."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ddpnopt.lab.data import Dataset
from ddpnopt.lab.runs.classification import Objective, objective
from ddpnopt.lab.runs.config import RunConfig
from ddpnopt.lab.runs.outcome import Outcome, sampled_curve
from ddpnopt.lab.runs.stacked import recipe as recipes
from ddpnopt.lab.runs.stacked.network import activations, outputs, weights
from ddpnopt.lab.runs.stacked.step import Stack, losses_and_step


@dataclass(eq=False)
class Trained:
    """What came out of a stack; rows of runs that diverged are None."""

    weights: list[list[Tensor] | None]
    """(O, J) per layer, bias last."""
    losses: list[list[float]]
    seconds: list[float]
    """After every step, of the whole stack."""
    cpu_seconds: list[float]
    update_norms: list[list[float]]
    """Of each run: the mean over the steps after the first epoch, layer by layer; empty if not asked for."""


def train(configs: Sequence[RunConfig], models: Sequence[nn.Module], data: Sequence[Dataset]) -> Trained:
    """Trains the models as the configurations say; those that diverge leave the stack and the others go on."""
    first = configs[0]
    kinds = activations(models[0])
    assert kinds is not None
    own = [recipes.own(config) for config in configs]
    U = weights(models)
    numbers = {name: torch.tensor([each[name] for each in own], dtype=U[0].dtype) for name in own[0]}
    stack, recipe = Stack(kinds, U, numbers), recipes.recipe(first)
    batches = Batches(configs, data)
    alive = torch.arange(len(configs))
    record: list[tuple[Tensor, Tensor]] = []
    start, cpu_start = time.perf_counter(), time.process_time()
    seconds: list[float] = []
    cpu_seconds: list[float] = []
    task = recipes.classification(first)
    moved = torch.zeros(len(configs), len(U)) if task.measure_updates else None
    counted = torch.zeros(len(configs))
    for epoch in range(task.epochs):
        for x, y in batches.epoch():
            if not len(alive):
                break
            rows = batches.of_run[alive]
            before = list(stack.U)
            losses, wrong = losses_and_step(stack, recipe, x[rows], y[rows])
            if moved is not None and epoch > 0:
                norms = [(new - old).flatten(1).norm(dim=1) for new, old in zip(stack.U, before, strict=True)]
                moved[alive] += torch.where(wrong[:, None], 0.0, torch.stack(norms, 1))
                counted[alive] += (~wrong).float()
            if bool(wrong.any()):
                right = (~wrong).nonzero().flatten()
                stack, alive, losses = stack.select(right), alive[right], losses[right]
            record.append((alive, losses))
            seconds.append(time.perf_counter() - start)
            cpu_seconds.append(time.process_time() - cpu_start)
    by_run: list[list[float]] = [[] for _ in configs]
    for runs, losses in record:
        for run, loss in zip(runs.tolist(), losses.tolist(), strict=True):
            by_run[run].append(loss)
    final: list[list[Tensor] | None] = [None] * len(configs)
    for row, run in enumerate(alive.tolist()):
        final[run] = [u[row] for u in stack.U]
    means = [[]] * len(configs) if moved is None else (moved / counted.clamp_min(1)[:, None]).tolist()
    return Trained(final, by_run, seconds, cpu_seconds, means)


class Batches:
    """The batches of every data set in the order of its seed; runs of one seed share them."""

    def __init__(self, configs: Sequence[RunConfig], data: Sequence[Dataset]) -> None:
        seeds = list(dict.fromkeys(config.seed for config in configs))
        self.of_run = torch.tensor([seeds.index(config.seed) for config in configs])
        by_seed = {config.seed: each for config, each in zip(configs, data, strict=True)}
        self.x = [by_seed[seed].x_train.flatten(1) for seed in seeds]
        self.y = [by_seed[seed].y_train for seed in seeds]
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.batch_size = recipes.classification(configs[0]).batch_size

    def epoch(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(S, B, n) and (S, B) for the S seeds; the last batch may be smaller."""
        orders = [torch.randperm(len(y), generator=g) for y, g in zip(self.y, self.generators, strict=True)]
        for chosen in zip(*(order.split(self.batch_size) for order in orders), strict=True):
            x = torch.stack([each[rows] for each, rows in zip(self.x, chosen, strict=True)])
            yield x, torch.stack([each[rows] for each, rows in zip(self.y, chosen, strict=True)])


def outcomes(configs: Sequence[RunConfig], models: Sequence[nn.Module], data: Sequence[Dataset]) -> list[Outcome]:
    """Trains a stack and tests every run."""
    trained = train(configs, models, data)
    count = len(configs)
    kinds = activations(models[0])
    assert kinds is not None
    found = []
    task = recipes.classification(configs[0])
    goal = objective(task.loss, task.classes)
    runs = zip(configs, data, trained.losses, trained.weights, trained.update_norms, strict=True)
    for config, each, losses, u, norms in runs:
        train_loss, accuracy = math.nan, math.nan
        if u is not None:
            train_loss, _ = _evaluate(goal, kinds, u, each.x_train, each.y_train)
            tested, accuracy = _evaluate(goal, kinds, u, each.x_test, each.y_test)
            if not (math.isfinite(train_loss) and math.isfinite(tested)):
                train_loss, accuracy, u = math.nan, math.nan, None
        steps = len(losses)
        seconds = [s / count for s in trained.seconds[:steps]]
        cpu_seconds = [s / count for s in trained.cpu_seconds[:steps]]
        found.append(
            Outcome(
                metric=accuracy,
                lr=recipes.own(config)["lr"],
                seconds=seconds[-1] if seconds else 0.0,
                cpu_seconds=cpu_seconds[-1] if seconds else 0.0,
                steps=steps,
                diverged=u is None,
                error="",
                curve=sampled_curve(seconds, cpu_seconds, losses),
                train_loss=train_loss,
                together=count,
                update_norms=norms,
            )
        )
    return found


def _evaluate(goal: Objective, kinds: Sequence[str], u: Sequence[Tensor], x: Tensor, y: Tensor) -> tuple[float, float]:
    """Mean loss and accuracy in percent of one run, small enough to be taken at once."""
    z = outputs(kinds, [each[None] for each in u], x.flatten(1)[None])[0]
    return float(goal.loss(z, y)), 100 * float((goal.predict(z) == y).sum()) / len(y)
