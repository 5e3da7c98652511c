"""DDPNOpt compared with other optimizers on a task of the user's own: `from ddpnopt.lab import compare`."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from ddpnopt.lab.comparison.comparison import ComparedMethod, ComparedRun, Comparison, summarise
from ddpnopt.lab.comparison.own_task import BatchSource, LossOfBatch, MetricOfModel, ModelSource, OwnTask
from ddpnopt.lab.errors import ExperimentError, NoDefaultRateError, NotApplicableError
from ddpnopt.lab.methods.registry import METHODS, NEWER, TRAINED_METHODS, method, require_installed
from ddpnopt.lab.runs.config import RunConfig
from ddpnopt.lab.runs.entrants import OWN_DEFAULTS, RATES, Entrant, all_runs, all_trials
from ddpnopt.lab.runs.outcome import Outcome
from ddpnopt.lab.runs.store import STORE, Store, code_state
from ddpnopt.lab.runs.training import Progress, train

OWN_METHODS = ("ddpnopt", "adam", "sgd-m", "adamw")
KNOWN = (*TRAINED_METHODS, *(each.name for each in NEWER))
IN_MEMORY = Path(":memory:")
OnOwnStep = Callable[[RunConfig, int, int, Progress | None], None]
"""Called with a run, its number, the number of all runs of this part, and how far it is; None: it has been kept."""


def compare(
    model: ModelSource,
    batches: BatchSource,
    loss: LossOfBatch,
    *,
    steps: int,
    evaluate: MetricOfModel | None = None,
    better: str = "higher",
    metric: str = "",
    methods: Sequence[str] = OWN_METHODS,
    seeds: int = 1,
    tune: bool = True,
    name: str = "my task",
    store: Path | str | None = None,
    on_step: OnOwnStep = lambda *_: None,
) -> Comparison:
    """Train your model with DDPNOpt and with other optimizers, from the same weights and on the same batches.

    Args:
        model: a function that returns a new model, or a model, which is copied.
        batches: a function that yields batches (called with a `torch.Generator` if it takes an argument), or something
            that can be gone through again and again, such as a DataLoader. It starts again where it ends.
        loss: `loss(model, batch)`, the tensor to call `backward` on.
        steps: of each run.
        evaluate: `evaluate(model)`, a number to judge the trained model by. Without it the final training loss counts.
        better: whether a "higher" or a "lower" number is better.
        metric: what to call it.
        methods: names; `name@lr` fixes a learning rate, as in "adam@0.001".
        seeds: how many runs of each method; weights and batches differ between them.
        tune: try Adam and SGD with momentum at five learning rates each and take the best, as `evaluate` says. That
            favours them: DDPNOpt has no rate to choose.
        name: of the task, in titles and in the store.
        store: a folder or file that keeps finished runs, so that an interrupted comparison goes on. Runs are found by
            name, steps and the source of the functions, so choose another name if the data change.
        on_step: called after each step.

    Returns:
        The comparison: `print(result)` shows a table, `result.save(folder)` writes picture and numbers.
    """
    functions = [each for each in (model, batches, loss, evaluate) if inspect.isfunction(each)]
    source = "".join(_source(each) for each in functions)
    digest = hashlib.sha256(source.encode()).hexdigest()[:12]
    task = OwnTask(name, model, batches, loss, steps, evaluate, metric, better, digest)
    return compare_own(task, methods, seeds, tune=tune, store=None if store is None else Path(store), on_step=on_step)


def compare_own(
    task: OwnTask,
    methods: Iterable[str] = OWN_METHODS,
    seeds: int = 1,
    *,
    tune: bool = True,
    store: Path | None = None,
    fresh: bool = False,
    on_step: OnOwnStep = lambda *_: None,
) -> Comparison:
    """The same for a task that is described already; with `fresh` kept runs are forgotten."""
    if seeds < 1:
        raise ExperimentError(f"seeds must be at least 1, not {seeds}")
    chosen = own_entrants(methods, tune=tune)
    task = task.checked()
    if store is not None:
        store = store if store.suffix else store / STORE
        store.parent.mkdir(parents=True, exist_ok=True)
    kept = Store(store or IN_MEMORY)
    try:
        trials = all_trials([task], chosen)
        every = [RunConfig(run.method, task, run.lr, seed=seed) for run in trials for seed in range(seeds)]
        plain = [run for each in chosen if not each.rates for run in each.runs(task, {}, seeds)]
        if fresh:
            kept.remove([run.key for run in (*every, *plain)], unless_code="")
        ours = [run.key for run in (*every, *plain) if run.method.startswith("ddpnopt")]
        kept.remove(ours, unless_code=code_state())  # a new version of the optimizer trains again
        outcomes = _carry_out(trials, kept, on_step)
        outcomes |= _carry_out(all_runs([task], chosen, outcomes, seeds), kept, on_step)
    finally:
        kept.close()
    found: dict[ComparedMethod, list[ComparedRun]] = {}
    for each in chosen:
        runs = [run for run in each.runs(task, outcomes, seeds) if run in outcomes]
        if runs:
            key = ComparedMethod(each.name, runs[0].lr)
            found[key] = [ComparedRun(run, outcomes[run]) for run in runs]
    if not found:
        raise ExperimentError(f"none of the methods applies to {task.name}")
    title = f"{task.name}, {task.steps} steps"
    return Comparison(task, title, note(chosen, task, found), summarise(found), task.metric_name, "metric")


def own_entrants(methods: Iterable[str], *, tune: bool) -> list[Entrant]:
    """The methods, each at the rate that is named, at the best of several, or at its default."""
    wanted = list(dict.fromkeys(ComparedMethod.parse(text, KNOWN) for text in methods))
    if not wanted:
        raise ExperimentError("no method is named")
    made = []
    for each in wanted:
        chosen = method(each.method)
        rates = RATES.get(each.method, ()) if tune and each.lr is None else ()
        rate = each.lr or (None if rates else OWN_DEFAULTS.get(each.method))
        made.append(Entrant(chosen, rates, rate, held_out=False))
    require_installed(each.method for each in made)
    return made


def planned_runs(chosen: Sequence[Entrant], seeds: int) -> int:
    """How many runs there will be; the trial of the rate that wins is the run of its first seed."""
    return sum(len(each.rates) - 1 if each.rates else 0 for each in chosen) + seeds * len(chosen)


def note(chosen: Sequence[Entrant], task: OwnTask, found: dict[ComparedMethod, list[ComparedRun]]) -> str:
    """How the rates were chosen, and which runs ended with an error."""
    tuned = [each.method.label for each in chosen if each.rates]
    rates = f"best of {len(next(each.rates for each in chosen if each.rates))} rates" if tuned else ""
    parts = [f"{' and '.join(tuned)}: {rates} by the {task.metric_name} of the first seed"] if tuned else []
    for each, runs in found.items():
        errors = {run.outcome.error for run in runs if run.outcome.error}
        parts += [f"{METHODS[each.method].label} ended with {error}" for error in sorted(errors)]
    return ". ".join(parts)


def _carry_out(wanted: Sequence[RunConfig], store: Store, on_step: OnOwnStep) -> dict[RunConfig, Outcome]:
    """From the store, or trained now, one after the other; each is kept as soon as it is finished.

    A run that ended with an error or diverged is not kept: whoever gives the command again has probably mended
    something that the file only reads. It has ended early, so that it costs little.
    """
    there = store.outcomes()
    found: dict[RunConfig, Outcome] = {}
    for number, run in enumerate(wanted):
        if run.key in there and not there[run.key].diverged:
            found[run] = there[run.key]
            on_step(run, number, len(wanted), None)
            continue

        def forward(progress: Progress, run: RunConfig = run, number: int = number) -> None:
            on_step(run, number, len(wanted), progress)

        try:
            outcome = train(run, on_step=forward, record_errors=True)
        except (NoDefaultRateError, NotApplicableError):
            continue
        found[run] = replace(outcome, details=None)  # the same from the store and from here
        if not outcome.error and not outcome.diverged:
            store.remove([run.key], unless_code="")  # one that had diverged
            store.add({run.key: outcome})
    return found


def _source(function: Callable[..., object]) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):  # typed at a prompt
        return function.__code__.co_code.hex() + repr(function.__code__.co_consts)
