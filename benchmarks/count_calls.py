"""How far a batch travels through the code: calls, modules and calls into another module of one warm step().

    python benchmarks/count_calls.py

counts the named functions of ddpnopt (no lambdas, no comprehensions) that one step of a three-layer network calls and
the operations that torch is asked for, writes the counts to results/speed/calls.csv, and compares the time of a step
with that of SGD.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import ddpnopt
from ddpnopt import DDPNOpt
from ddpnopt.lab.tables import write_csv

ROOT = str(Path(ddpnopt.__file__).parent)
FORMS: dict[str, dict[str, Any]] = {"default": {}, "outer": {"value": "outer", "lr": 0.1}}
WARM_UP = 25  # steps
ROUNDS, STEPS = 15, 60  # of the timing
OUT = Path(__file__).parents[1] / "results" / "speed" / "calls.csv"


class Counter:
    """Counts the calls of named functions of the package while it is entered."""

    def __init__(self) -> None:
        self.calls = self.crossings = 0
        self.modules: set[str] = set()

    def _profile(self, frame: FrameType, event: str, arg: object) -> None:
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(ROOT) or frame.f_code.co_name.startswith("<"):
            return
        self.calls += 1
        self.modules.add(file)
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(ROOT):
            caller = caller.f_back
        self.crossings += caller is None or caller.f_code.co_filename != file

    def __enter__(self) -> Counter:
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)


class Operations(TorchDispatchMode):
    """Counts the operations of torch while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 10))


def trainer(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Callable[[], None]:
    """A call runs one forward and backward pass, without the step."""

    def passes() -> None:
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()

    return passes


def count(opt: DDPNOpt, passes: Callable[[], None]) -> dict[str, int]:
    """The calls of a step whose first sweep is accepted."""
    while True:
        passes()
        shortened = opt.report.shortened
        with Operations() as operations, Counter() as counter:
            opt.step()
        if opt.report.shortened == shortened:
            return {
                "calls": counter.calls,
                "modules": len(counter.modules),
                "calls into another module": counter.crossings,
                "torch operations": operations.count,
            }


def seconds(opt: torch.optim.Optimizer, passes: Callable[[], None]) -> float:
    start = time.process_time()
    for _ in range(STEPS):
        passes()
        opt.step()
    return (time.process_time() - start) / STEPS


def main() -> None:
    torch.set_num_threads(1)
    x, y = torch.randn(32, 64), torch.randint(10, (32,))
    rows = []
    for name, options in FORMS.items():
        model, plain = network(), network()
        opt, sgd = DDPNOpt(model, **options), torch.optim.SGD(plain.parameters(), lr=0.01)
        ours, theirs = trainer(model, opt, x, y), trainer(plain, sgd, x, y)
        for _ in range(WARM_UP):
            ours()
            opt.step()
        rows.append({"form": name, **count(opt, ours)})
        ratio = statistics.median(seconds(opt, ours) / seconds(sgd, theirs) for _ in range(ROUNDS))
        print(", ".join(f"{key} {value}" for key, value in rows[-1].items()), f"{ratio:.2f} times the time of SGD")
    write_csv(OUT, rows)


if __name__ == "__main__":
    main()
