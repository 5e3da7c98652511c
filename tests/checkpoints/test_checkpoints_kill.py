"""A run that is killed with SIGKILL, at whatever moment, loses at most the work since its last checkpoint.

A few kills run with the other tests. The long mode, a hundred:

    DDPNOPT_KILLS=100 pytest tests/checkpoints
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpnopt.checkpoint import load
from ddpnopt.lab.data import load as load_data
from ddpnopt.lab.runs.checkpoints import Checkpoints
from ddpnopt.lab.runs.classification import ClassificationTask
from ddpnopt.lab.runs.config import RunConfig
from ddpnopt.lab.runs.outcome import RunDetails
from ddpnopt.lab.runs.training import train

KILLS = int(os.environ.get("DDPNOPT_KILLS", "5"))
EVERY = 2
SRC = Path(__file__).parents[2] / "src"
TASK = ClassificationTask("wine", epochs=3 + 2 * KILLS, batch_size=16)
RUN = RunConfig("ddpnopt", TASK, seed=3)


def run(path: Path | None, on_step: Callable[[Any], None] = lambda _: None) -> RunDetails:
    checkpoints = None if path is None else Checkpoints(path, EVERY)
    done = train(
        RUN, TASK.problem_on(load_data("wine", seed=RUN.seed), RUN.seed), on_step=on_step, checkpoints=checkpoints
    )
    assert done.details is not None
    return done.details


def child(path: Path | None, steps: Connection, result: Path) -> None:
    """A run that tells each step, and its weights at the end."""
    done = run(path, lambda now: steps.send(now.step))
    torch.save({"weights": done.weights, "losses": done.record.losses}, result)


def begin(path: Path | None, result: Path) -> tuple[Any, Connection]:
    """A run in a process of its own, and its steps. Forked, so that a hundred of them import torch once; nothing may
    have been computed here before."""
    fork = multiprocessing.get_context("fork")
    reader, writer = fork.Pipe(duplex=False)
    process = fork.Process(target=child, args=(path, writer, result))
    process.start()
    writer.close()
    return process, reader


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL and no fork")
def test_killed_at_random_moments_a_run_ends_with_the_same_weights_bit_for_bit(tmp_path: Path) -> None:
    path, result = tmp_path / "run.pt", tmp_path / "result.pt"
    undisturbed, _steps = begin(None, tmp_path / "whole.pt")
    undisturbed.join(900)
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    moment = random.Random(0)
    kills = 0
    while True:
        process, steps = begin(path, result)
        if kills < KILLS:
            steps.poll(900)  # it has begun; from here any moment may be the last
            time.sleep(moment.uniform(0, 0.03))
            os.kill(process.pid, signal.SIGKILL)
        process.join(900)
        told = last_step(steps)
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        kills += 1
        kept = len(load(path)["losses"]) if path.exists() else 0  # it always loads
        assert told - kept < EVERY  # a step is told after its checkpoint, if it has one, is on the disk
    assert kills == KILLS
    resumed = torch.load(result, weights_only=True)
    assert resumed["losses"] == whole["losses"]
    assert all(torch.equal(resumed["weights"][name], w) for name, w in whole["weights"].items())
    assert {p.name for p in tmp_path.iterdir()} <= {"run.pt", ".run.pt.partial", "result.pt", "whole.pt"}  # no litter


def last_step(reader: Connection) -> int:
    step = 0
    while True:
        try:
            if not reader.poll(0):
                return step
            step = reader.recv()
        except (EOFError, OSError):
            return step


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")
def test_the_command_goes_on_after_a_kill_and_saves_the_same_weights(tmp_path: Path) -> None:
    checkpoint, saved, whole = tmp_path / "run.pt", tmp_path / "a.pt", tmp_path / "b.pt"
    command = [sys.executable, "-m", "ddpnopt", "train", "wine", "--epochs", "5", "--batch-size", "8"]
    environment = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    resumable = [*command, "--checkpoint", str(checkpoint), "--every", "1", "--save", str(saved)]
    process = subprocess.Popen(resumable, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not checkpoint.exists() and process.poll() is None:
        time.sleep(0.005)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert not saved.exists()
    second = subprocess.run(resumable, env=environment, capture_output=True, text=True, check=True)
    assert "continuing from" in second.stderr
    subprocess.run([*command, "--save", str(whole)], env=environment, capture_output=True, check=True)
    a, b = (torch.load(p, weights_only=True)["state_dict"] for p in (saved, whole))
    assert all(torch.equal(a[name], b[name]) for name in b)
