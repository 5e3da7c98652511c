"""Two, three and four processes give the weights of one process on the whole batch, uneven last batches included."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import team
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddpnopt import DDPNOpt, OptionError

EXAMPLE = Path(__file__).parents[2] / "examples" / "distributed.py"
Made = list[dict[Any, Any]]


def run_team(folder: Path) -> Made:
    """What four processes started by torchrun have found."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    done = subprocess.run([*command, team.__file__, str(folder)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"{rank}.pt") for rank in range(4)]


def apart(a: list[Tensor], b: list[Tensor]) -> float:
    return max(float((p - q).abs().max()) for p, q in zip(a, b, strict=True))


@pytest.mark.filterwarnings("ignore::ddpnopt.OpenLoopWarning")
def test_two_three_and_four_processes_give_the_weights_of_one_and_tell_each_other_of_trouble(tmp_path: Path) -> None:
    """One test, so that the processes are started once."""
    made = run_team(tmp_path)
    alone = {case: team.weights(team.train(case)[0]) for case in team.CASES}
    off = {
        (size, case): error
        for size in (2, 3, 4)
        for case in team.of(size)
        if (error := apart(made[size - 1][size, case], alone[case])) > 1e-9
    }
    assert not off
    for size in (2, 3, 4):
        for case in team.of(size):  # to the last bit the same in all processes
            assert all(apart(made[rank][size, case], made[0][size, case]) == 0 for rank in range(size))
    assert apart(made[0]["micro-batches"], alone["batch"]) < 1e-9

    assert apart(made[0]["disagree"], made[1]["disagree"]) == 0  # one is certain of its loss, the other is not

    first, second = (made[rank]["trouble"] for rank in (0, 1))
    assert first["error"][0] == "StepError"
    assert "Rank 1 could not" in first["error"][1]
    assert "changed in place" in second["error"][1]
    for told in (first, second):
        assert told["nan"][0] == "NonFiniteError"
        assert "rank 1" in told["nan"][1]
        assert told["another way"][0] in ("ModelError", "StepError")


def test_a_group_without_torch_distributed_is_refused() -> None:
    with pytest.raises(OptionError, match=r"data_parallel.*init_process_group.*torchrun"):
        DDPNOpt(team.fcn(), data_parallel=True)


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("first", [False, True])
def test_a_pass_beside_the_wrapper_leaves_the_step_one_of_all_processes(first: bool) -> None:
    torch.manual_seed(0)
    model = team.fcn()
    wrapped = DistributedDataParallel(model)
    opt = DDPNOpt(wrapped)
    x, y = team.vectors()
    for beside in (first, not first):
        if beside:
            torch.autograd.grad(F.cross_entropy(model(x), y), [*model.parameters()])
        else:
            F.cross_entropy(wrapped(x), y).backward()
    opt.step()
    assert opt._group is not None
    assert opt._group.calls


def start(rank: int, port: int, *arguments: str) -> subprocess.Popen[str]:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": str(rank)}
    environment = {**os.environ, **place, "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, str(EXAMPLE), *arguments],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_a_process_that_dies_ends_the_others_with_a_clear_message_and_a_whole_checkpoint(tmp_path: Path) -> None:
    checkpoint = tmp_path / "run.pt"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [start(rank, port, "--steps", "1000000", "--checkpoint", str(checkpoint)) for rank in (0, 1)]
    try:
        deadline = time.monotonic() + 120
        while not checkpoint.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        processes[1].send_signal(signal.SIGKILL)
        _, told = processes[0].communicate(timeout=60)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert processes[0].returncode not in (0, -signal.SIGKILL)
    assert "PeerError: Rank 0 of 2 lost contact" in told
    assert "last checkpoint" in told
    state = torch.load(checkpoint, weights_only=True)
    assert state["step"] % 10 == 0
    assert all(bool(p.isfinite().all()) for p in state["model"].values())
