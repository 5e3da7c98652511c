"""One training run of the benchmark: a configuration in, an outcome out, whatever happens on the way."""

from __future__ import annotations

import json
import math
import time
import warnings
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from ddpnopt.bench.contenders import Contender, ddpnopt_defaults
from ddpnopt.bench.tasks import Task
from ddpnopt.errors import OptionError
from ddpnopt.experiments.data import Dataset, load
from ddpnopt.experiments.networks import build
from ddpnopt.experiments.training import Progress, evaluate, fit

SAMPLES = 50


@dataclass(frozen=True)
class Run:
    """All that decides a run."""

    task: Task
    contender: Contender
    lr: float | None
    """None is the default setting."""
    seed: int

    @property
    def key(self) -> str:
        """The same text for the same computation: names and labels are left out, DDPNOpt's defaults spelled out."""
        task = self.task
        parts: dict[str, Any] = {
            "dataset": task.dataset,
            "network": task.network,
            "n_train": task.n_train,
            "epochs": task.epochs,
            "batch_size": task.batch_size,
            "method": "ddpnopt" if self.contender.ours else self.contender.name,
            "lr": self.lr,
            "seed": self.seed,
        }
        if self.contender.ours:
            parts["options"] = {**ddpnopt_defaults(), **self.contender.options}
            del parts["options"]["lr"]
            if self.lr is None:
                parts["default"] = ddpnopt_defaults()["lr"]
        return json.dumps(parts, sort_keys=True, default=str)


@dataclass(frozen=True)
class Curve:
    """The training loss at about fifty moments: each is the mean of the batches since the one before."""

    steps: list[int]
    seconds: list[float]
    """Wall-clock time of training so far."""
    cpu_seconds: list[float]
    losses: list[float]


@dataclass(frozen=True)
class Outcome:
    """What a run gave."""

    accuracy: float
    """On the test set, in percent; of a run that diverged NaN."""
    lr: float
    """The learning rate that was used, the default included."""
    seconds: float
    cpu_seconds: float
    steps: int
    diverged: bool
    error: str
    curve: Curve

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Outcome:
        content = json.loads(text)
        return cls(**{**content, "curve": Curve(**content["curve"])})


class Refused(Exception):  # noqa: N818 (no fault of anyone: a form of DDPNOpt without a default learning rate)
    """The optimizer does not take this setting at all: neither a result nor a failure."""


class Stopwatch:
    """Loss, wall-clock and processor time after every step."""

    def __init__(self) -> None:
        self.start, self.cpu_start = time.perf_counter(), time.process_time()
        self.taken: list[tuple[float, float, float]] = []

    def __call__(self, now: Progress) -> None:
        self.taken.append((time.perf_counter() - self.start, time.process_time() - self.cpu_start, now.loss))

    def curve(self) -> Curve:
        """The record in about fifty bins."""
        count = len(self.taken)
        ends = sorted({round(count * (i + 1) / SAMPLES) for i in range(SAMPLES)} - {0})
        return Curve(
            ends,
            [round(self.taken[end - 1][0], 5) for end in ends],
            [round(self.taken[end - 1][1], 5) for end in ends],
            [sum(t[2] for t in self.taken[a:b]) / (b - a) for a, b in pairwise([0, *ends])],
        )


def perform(run: Run, data_dir: Path | None = None) -> Outcome:
    """Trains and tests. An exception while training, such as `NonFiniteError`, is a run that diverged."""
    data = _data(run.task.dataset, run.task.n_train, run.seed, data_dir)
    model = build(run.task.network, data, run.seed)
    try:
        optimizer = run.contender.build(model, run.lr)
    except OptionError as wrong:
        raise Refused(str(wrong)) from wrong
    lr = float(optimizer.param_groups[0]["lr"])
    _mode(optimizer, "train")
    error, diverged = "", False
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(run.seed)
        watch = Stopwatch()
        try:
            diverged = fit(
                model,
                optimizer,
                data,
                epochs=run.task.epochs,
                batch_size=run.task.batch_size,
                generator=torch.Generator().manual_seed(run.seed),
                on_step=watch,
            ).diverged
        except Exception as failed:  # an eigendecomposition of NaN raises LinAlgError, others what they like
            diverged, error = True, f"{type(failed).__name__}: {failed}"[:300]
    accuracy = math.nan
    if not diverged:
        _mode(optimizer, "eval")
        loss, accuracy = evaluate(model, data.x_test, data.y_test)
        diverged = not math.isfinite(loss)
    seconds, cpu_seconds = watch.taken[-1][:2] if watch.taken else (0.0, 0.0)
    return Outcome(
        math.nan if diverged else accuracy, lr, seconds, cpu_seconds, len(watch.taken), diverged, error, watch.curve()
    )


@lru_cache(maxsize=2)
def _data(name: str, n_train: int | None, seed: int, data_dir: Path | None) -> Dataset:
    """The data of a seed; only subsets are kept, as the whole of an image set is large."""
    whole = load(name, seed=seed, data_dir=data_dir)
    return whole if n_train is None else whole.subset(n_train, seed)


def _mode(optimizer: torch.optim.Optimizer, mode: str) -> None:
    """Schedule-free optimizers keep two sets of weights, one to train and one to use."""
    switch = getattr(optimizer, mode, None)
    if switch is not None:
        switch()
