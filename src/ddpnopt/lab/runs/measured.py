"""One training run measured: a model and an optimizer in, an outcome out, whatever happens on the way."""

from __future__ import annotations

import math
import warnings

import torch
from torch import nn
from torch.optim import Optimizer

from ddpnopt.lab.data import Dataset
from ddpnopt.lab.runs.outcome import Outcome, Stopwatch
from ddpnopt.lab.runs.training import evaluate, fit, set_mode


def measured(
    model: nn.Module,
    optimizer: Optimizer,
    data: Dataset,
    *,
    epochs: int,
    batch_size: int,
    seed: int,
    train_loss: bool,
) -> Outcome:
    """Trains and tests. An exception while training, such as `NonFiniteError`, is a run that diverged."""
    lr = float(optimizer.param_groups[0]["lr"])
    set_mode(optimizer, "train")
    error, diverged = "", False
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)  # for layers that draw, such as dropout
        watch = Stopwatch()
        try:
            diverged = fit(
                model,
                optimizer,
                data,
                epochs=epochs,
                batch_size=batch_size,
                generator=torch.Generator().manual_seed(seed),
                on_step=watch,
            ).diverged
        except Exception as failed:  # an eigendecomposition of NaN raises LinAlgError, others what they like
            diverged, error = True, f"{type(failed).__name__}: {failed}"[:300]
    accuracy = loss = math.nan
    if not diverged:
        set_mode(optimizer, "eval")
        tested, accuracy = evaluate(model, data.x_test, data.y_test)
        diverged = not math.isfinite(tested)
    if train_loss and not diverged:
        loss, _ = evaluate(model, data.x_train, data.y_train)
        diverged = not math.isfinite(loss)
    return Outcome(
        accuracy=math.nan if diverged else accuracy,
        lr=lr,
        seconds=watch.seconds[-1] if watch.seconds else 0.0,
        cpu_seconds=watch.cpu_seconds[-1] if watch.seconds else 0.0,
        steps=len(watch.losses),
        diverged=diverged,
        error=error,
        curve=watch.curve(),
        train_loss=math.nan if diverged else loss,
    )
