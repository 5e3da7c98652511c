"""How much longer do 256 pendulums take than one? Prints the ratios measured in this run.

    python examples/control/batch_speed.py [--out results/control]

Processor time on one thread. It first runs a fixed number of iterations per problem (zero tolerances, so that none
stops early), then runs until convergence, where the batch takes as long as its slowest member. With `--out` the ratios
are written to a table.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ddpnopt.control import Solution, solve
from ddpnopt.control.systems import hanging_starts, pendulum


def seconds(run: Callable[[], Solution], repeats: int) -> float:
    """Median of several runs, after one to warm up."""
    run()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--iterations", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=float, default=None, help="torque limit: box-DDP")
    parser.add_argument("--out", type=Path, default=None, help="folder of the table")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # small tensors: more threads are slower

    task = pendulum(limit=arguments.limit)
    x0 = hanging_starts(arguments.batch)
    B, n = arguments.batch, arguments.iterations
    table = [("method", "problems", "times one, equal iterations", "times the slowest one, to convergence")]
    for method in ("ilqr", "ddp"):

        def fixed(x0: torch.Tensor, method: str = method) -> Solution:
            return solve(
                task.problem,
                x0,
                task.u0,
                method=method,
                max_iterations=n,
                grad_tol=0,
                cost_tol=0,
                reg_max=1e30,
            )

        one = seconds(lambda fixed=fixed: fixed(x0[0]), arguments.repeats)
        many = seconds(lambda fixed=fixed: fixed(x0), arguments.repeats)
        print(f"{method}: {n} iterations each: one {one:.3f} s, {B} together {many:.3f} s, ratio {many / one:.1f}")

        start = time.process_time()
        solution = solve(task.problem, x0, task.u0, method=method)
        whole = time.process_time() - start
        slowest = int(solution.iterations.argmax())
        start = time.process_time()
        solve(task.problem, x0[slowest], task.u0, method=method)
        alone = time.process_time() - start
        print(
            f"{method}: to convergence: {int(solution.converged.sum())} of {B} converged, iterations "
            f"{int(solution.iterations.min())} to {int(solution.iterations.max())}; "
            f"all {whole:.2f} s, the slowest one alone {alone:.2f} s, ratio {whole / alone:.1f}"
        )
        table.append((method, str(B), f"{many / one:.1f}", f"{whole / alone:.1f}"))
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        with (arguments.out / "batch-speed.csv").open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(table)


if __name__ == "__main__":
    main()
