"""How much longer do 256 pendulums take than one? Prints the ratios measured in this run.

    python examples/control/batch_speed.py

It first runs a fixed number of iterations per problem (zero tolerances, so that none stops early), then runs until
convergence, where the batch takes as long as its slowest member.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from ddpnopt.control import Solution, solve
from ddpnopt.control.systems import hanging_starts, pendulum


def seconds(run: Callable[[], Solution], repeats: int) -> float:
    """Median of several runs, after one to warm up."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--iterations", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=float, default=None, help="torque limit: box-DDP")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # small tensors: more threads are slower

    task = pendulum(limit=arguments.limit)
    x0 = hanging_starts(arguments.batch)
    B, n = arguments.batch, arguments.iterations
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

        start = time.perf_counter()
        solution = solve(task.problem, x0, task.u0, method=method)
        whole = time.perf_counter() - start
        slowest = int(solution.iterations.argmax())
        start = time.perf_counter()
        solve(task.problem, x0[slowest], task.u0, method=method)
        alone = time.perf_counter() - start
        print(
            f"{method}: to convergence: {int(solution.converged.sum())} of {B} converged, iterations "
            f"{int(solution.iterations.min())} to {int(solution.iterations.max())}; "
            f"all {whole:.2f} s, the slowest one alone {alone:.2f} s, ratio {whole / alone:.1f}"
        )


if __name__ == "__main__":
    main()
