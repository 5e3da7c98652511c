"""A task of the user's own: a model, batches, a loss and a metric as plain functions, for the run machinery."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddpnopt.lab.comparison.user_code import called, fault_of, place, returned
from ddpnopt.lab.errors import TaskError
from ddpnopt.lab.runs.outcome import TrainingRecord
from ddpnopt.lab.runs.task import Evaluation

ModelSource = Callable[[], nn.Module] | nn.Module
BatchSource = Callable[..., Iterable[Any]] | Iterable[Any]
LossOfBatch = Callable[[nn.Module, Any], Tensor]
MetricOfModel = Callable[[nn.Module], float]

# Metrics that draw random numbers draw the same ones for every method.
EVALUATION_SEED = 2021


@dataclass(frozen=True, eq=False)
class OwnProblem:
    """One model to train; `batches` starts again where it ends."""

    task: OwnTask
    model: nn.Module
    epochs: int = 1
    hands_loss_over: bool = True

    @property
    def steps_per_epoch(self) -> int:
        return self.task.steps

    def epoch(self, generator: torch.Generator) -> Iterator[Any]:
        given = 0
        while given < self.task.steps:
            before = given
            for batch in self.task.pass_over(generator):
                yield batch
                given += 1
                if given == self.task.steps:
                    return
            if given == before:
                again = "gave no batch" if given == 0 else f"ended after {given} batches and then gave none"
                advice = (
                    "Are the data empty, or fewer than a batch, and the last batch is dropped?"
                    if given == 0
                    else "Let it be a function that makes them again, or something that can be gone through again, "
                    "such as a DataLoader."
                )
                raise TaskError(
                    f"`batches` {again}{place(self.task.batches)}: {self.task.steps} steps need as many batches. "
                    f"{advice}"
                )

    def loss(self, batch: Any) -> Tensor:
        """The user's loss; where the weights are not finite, an error is the optimizer's and not the user's."""
        with called("loss", self.task.loss, unless=self._diverged, model=self.model, batch=batch):
            found = self.task.loss(self.model, batch)
        if not isinstance(found, Tensor):
            raise returned("loss", self.task.loss, found, "a tensor with one number, to call backward on")
        if found.numel() != 1:
            raise returned(
                "loss", self.task.loss, found, "a tensor with one number, such as the mean over the batch: try .mean()"
            )
        if not bool(torch.isfinite(found)) and (fault := fault_of(batch)) and not self._diverged():
            raise TaskError(
                f"`batches` gave a batch that {fault}{place(self.task.batches)}, so that its loss is "
                f"{found.item():g}: mend or leave out such data."
            )
        return found.reshape(())

    def evaluate(self, record: TrainingRecord) -> Evaluation:
        """The mean loss of the last tenth of the steps, and the user's metric, or that loss again without one."""
        loss = record.final_loss
        if self.task.evaluate is None or self._diverged():
            return Evaluation(loss, math.nan if self._diverged() else loss)
        return Evaluation(loss, self._metric(self.task.evaluate))

    def untrained(self) -> Evaluation:
        """Before any step; checks everything on the way, so that a mistake shows at once and not after an hour."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model.train()
            loss = self.loss(next(self.epoch(torch.Generator().manual_seed(0))))
        value = float(loss.detach())
        if not math.isfinite(value):
            raise TaskError(
                f"`loss` is {value:g} for the first batch, before any step{place(self.task.loss)}: look at the data, "
                "at logarithms and divisions."
            )
        if not loss.requires_grad:
            raise TaskError(
                f"`loss` does not depend on the weights of the model{place(self.task.loss)}: it must not be computed "
                "under torch.no_grad() or from detached tensors."
            )
        with called("backward() of the loss", self.task.loss):
            loss.backward()
        self.model.zero_grad()
        if self.task.evaluate is None:
            return Evaluation(value, value)
        metric = self._metric(self.task.evaluate)
        if not math.isfinite(metric):
            raise TaskError(f"`evaluate` is {metric:g} for the untrained model{place(self.task.evaluate)}.")
        return Evaluation(value, metric)

    def _metric(self, evaluate: MetricOfModel) -> float:
        self.model.eval()
        with torch.no_grad(), torch.random.fork_rng(devices=[]), called("evaluate", evaluate):
            torch.manual_seed(EVALUATION_SEED)
            found = evaluate(self.model)
        try:
            return float(found)
        except (TypeError, ValueError, RuntimeError):
            raise returned("evaluate", evaluate, found, "one number, such as the accuracy in percent") from None

    def _diverged(self) -> bool:
        return not all(bool(torch.isfinite(p).all()) for p in self.model.parameters())


@dataclass(frozen=True, eq=False)
class OwnTask:
    """What is trained, for how long, and what it is judged by."""

    name: str
    model: ModelSource
    batches: BatchSource
    loss: LossOfBatch
    steps: int
    evaluate: MetricOfModel | None = None
    metric: str = ""
    better: str = "higher"
    source: str = field(default="", repr=False)
    """A digest of what defines the task: an edited one makes other runs."""
    start: Evaluation | None = None
    """Loss and metric of the untrained model, once `checked` has found them."""

    def __post_init__(self) -> None:
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise TaskError(f"`steps` must be a whole number of at least 1, not {self.steps!r}.")
        if self.better not in ("higher", "lower"):
            raise TaskError(f'`better` must be "higher" or "lower", not {self.better!r}.')
        _require_arguments("loss", self.loss, "model", "batch")
        if self.evaluate is not None:
            _require_arguments("evaluate", self.evaluate, "model")
        if not isinstance(self.model, nn.Module):
            _require_arguments("model", self.model)
        if isinstance(self.batches, Iterator):
            raise TaskError(
                "`batches` can be gone through only once, and each run needs all of it: give the function that makes "
                "it, or a DataLoader."
            )
        if not callable(self.batches) and not isinstance(self.batches, Iterable):
            raise TaskError(
                f"`batches` must be a function that yields batches, or a DataLoader, not {self.batches!r:.80}."
            )

    @property
    def identity(self) -> Mapping[str, Any]:
        return {"own_task": self.name, "steps": self.steps, "definition": self.source}

    @property
    def untrained(self) -> Evaluation:
        return self.start or self.problem(0).untrained()

    @property
    def higher_is_better(self) -> bool:
        return self.evaluate is not None and self.better == "higher"

    @property
    def metric_name(self) -> str:
        return "final training loss" if self.evaluate is None else self.metric or "metric"

    def checked(self) -> OwnTask:
        """The task after a look at everything: a `TaskError` names what does not fit, and the line."""
        return replace(self, start=self.problem(0).untrained())

    def pass_over(self, generator: torch.Generator) -> Iterator[Any]:
        """The user's batches from the first to the last; errors inside are told with their line."""
        with called("batches", self.batches):
            source = _call_batches(self.batches, generator) if callable(self.batches) else self.batches
            if not isinstance(source, Iterable):
                raise returned("batches", self.batches, source, "batches: use yield, or return a list or a DataLoader")
            if isinstance(source, tuple) and all(isinstance(part, Tensor) for part in source):
                raise TaskError(
                    f"`batches` is a tuple of {len(source)} tensors{place(self.batches)}, and each of them would be a "
                    "batch: yield the tuple, or put it into a list."
                )
            iterator = iter(source)
        while True:
            with called("batches", self.batches):
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
            yield batch

    def problem(self, seed: int, *, validation: bool = False, data_dir: Path | None = None) -> OwnProblem:
        """A new model, its weights drawn from `seed`; a given one is copied."""
        with torch.random.fork_rng(devices=[]), called("model", self.model):
            torch.manual_seed(seed)
            made = copy.deepcopy(self.model) if isinstance(self.model, nn.Module) else self.model()
        if not isinstance(made, nn.Module):
            raise returned("model", self.model, made, "a torch.nn.Module")
        if not any(p.requires_grad for p in made.parameters()):
            raise TaskError(f"`model` has no parameters to train{place(self.model)}.")
        return OwnProblem(self, made)


def _call_batches(batches: Callable[..., Iterable[Any]], generator: torch.Generator) -> Iterable[Any]:
    """With the generator if it takes an argument."""
    return batches(generator) if _takes(batches, generator) else batches()


def _takes(function: Callable[..., Any], *arguments: object) -> bool:
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        return True
    return True


def _require_arguments(name: str, function: object, *arguments: str) -> None:
    wanted = f"`{name}({', '.join(arguments)})`"
    if not callable(function):
        raise TaskError(f"`{name}` must be a function {wanted}, not {function!r:.80}.")
    if not _takes(function, *arguments):
        raise TaskError(
            f"`{name}` must be called as {wanted}; it takes {inspect.signature(function)}{place(function)}."
        )
