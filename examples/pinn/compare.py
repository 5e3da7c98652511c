"""Physics-informed networks with DDPNOpt, Adam and L-BFGS: `python examples/pinn/compare.py --out results/pinn`.

Each method gets the same network, the same fixed points and the same processor time, on one thread. Adam is shown at
the best of its learning rates, chosen by the error at the end. `--anew` draws new points in each step (without L-BFGS).
The picture shows the relative L2 error against time.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from problems import PROBLEMS, Problem, network
from torch import nn

from ddpnopt import DDPNOpt

ADAM_RATES = (1e-3, 3e-3, 1e-2, 3e-2)
Curve = list[tuple[float, int, float]]
"""Seconds, steps and error."""


def methods() -> dict[str, Callable[[nn.Module], torch.optim.Optimizer]]:
    made: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {"DDPNOpt": DDPNOpt}
    for rate in ADAM_RATES:
        made[f"Adam {rate:g}"] = lambda model, rate=rate: torch.optim.Adam(model.parameters(), lr=rate)  # type: ignore[misc]
    made["L-BFGS"] = lambda model: torch.optim.LBFGS(
        model.parameters(), max_iter=20, history_size=50, line_search_fn="strong_wolfe"
    )
    return made


def train(
    problem: Problem, make: Callable[[nn.Module], torch.optim.Optimizer], seconds: float, seed: int, *, anew: bool
) -> Curve:
    """Train for some processor time; the time of measurements does not count."""
    torch.manual_seed(seed)
    model, points = network(), problem.draw()
    opt = make(model)
    spent, steps, shown = 0.0, 0, 0.0
    curve: Curve = []
    while spent < seconds:
        start = time.process_time()
        if anew:
            points = problem.draw()

        def closure(points: Any = points) -> torch.Tensor:
            opt.zero_grad()
            loss = problem.loss(model, points)
            loss.backward()
            return loss

        opt.step(closure)
        spent, steps = spent + time.process_time() - start, steps + 1
        if spent >= shown or spent >= seconds:
            curve.append((spent, steps, problem.error(model)))
            shown = spent + seconds / 100
    return curve


def run(names: list[str], seconds: float, seeds: int, *, anew: bool) -> list[dict[str, Any]]:
    """One row for each point of each curve."""
    rows: list[dict[str, Any]] = []
    for name in names:
        problem = PROBLEMS[name]()
        for method, make in methods().items():
            if anew and method == "L-BFGS":
                continue
            for seed in range(seeds):
                curve = train(problem, make, seconds, seed, anew=anew)
                rows += [
                    {"problem": name, "points": "drawn anew" if anew else "fixed", "method": method, "seed": seed,
                     "seconds": f"{spent:.3f}", "steps": steps, "error": f"{error:.3e}"}
                    for spent, steps, error in curve
                ]  # fmt: skip
                print(name, method, seed, f"{curve[-1][1]} steps, error {curve[-1][2]:.2e}", flush=True)
    return rows


def last(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The median over the seeds of the error at the end; of Adam's rates the best."""
    ends: dict[tuple[str, str, str], dict[int, dict[str, Any]]] = {}
    for row in rows:
        ends.setdefault((row["problem"], row["points"], row["method"]), {})[row["seed"]] = row
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for (problem, points, method), seeds in ends.items():
        ordered = sorted(seeds.values(), key=lambda row: float(row["error"]))
        middle = ordered[len(ordered) // 2]
        key = problem, points, method.split()[0]
        if key not in found or float(middle["error"]) < float(found[key]["error"]):
            found[key] = {
                **middle,
                "seeds": len(ordered),
                "least": ordered[0]["error"],
                "largest": ordered[-1]["error"],
            }
    return list(found.values())


def draw(rows: list[dict[str, Any]], stem: Path) -> Path:
    """The errors against time; of Adam the best rate."""
    from matplotlib.figure import Figure

    from ddpnopt.lab import style

    colours = {"DDPNOpt": style.COLOURS["ddpnopt"], "Adam": "#3d6fb6", "L-BFGS": "#8f98a3"}
    best = {(row["problem"], row["method"]) for row in last(rows)}
    names = list(dict.fromkeys(row["problem"] for row in rows))
    with style.style():
        made = Figure(figsize=(8.4, 3.2))
        for axis, name in zip(made.subplots(1, len(names), sharey=True, squeeze=False)[0], names, strict=True):
            for method in dict.fromkeys(row["method"] for row in rows if (name, row["method"]) in best):
                for seed in {row["seed"] for row in rows}:
                    mine = [r for r in rows if (r["problem"], r["method"], r["seed"]) == (name, method, seed)]
                    axis.plot(
                        [float(r["seconds"]) for r in mine], [float(r["error"]) for r in mine],
                        color=colours[method.split()[0]], linewidth=1.3, label=method if seed == 0 else None,
                    )  # fmt: skip
            axis.set(xlabel="seconds on one thread", title=PROBLEMS[name]().title, yscale="log")
            axis.legend()
        made.axes[0].set_ylabel("relative L2 error")
        stem.parent.mkdir(parents=True, exist_ok=True)
        style.save(made, stem, ("png",))
    return stem.with_suffix(".png")


def main(
    problems: list[str] | None = None,
    seconds: float = 20.0,
    seeds: int = 3,
    anew: bool = False,
    out: Path | None = None,
) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    rows = run(problems or list(PROBLEMS), seconds, seeds, anew=anew)
    ends = last(rows)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        stem = "anew" if anew else "fixed"
        for name, some in ((stem, ends), (f"{stem}-curves", rows)):
            with (out / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, list(some[0]))
                writer.writeheader()
                writer.writerows(some)
        draw(rows, out / f"pinn-{stem}")
    for row in ends:
        print(f"{row['problem']:8} {row['points']:10} {row['method']:12} {row['steps']:6} steps  error {row['error']}")
    return ends


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--problems", nargs="+", choices=list(PROBLEMS))
    parser.add_argument("--seconds", type=float, help="processor time of each run")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--anew", action="store_true", help="draw new points in each step")
    parser.add_argument("--out", type=Path, help="folder for tables and a picture")
    main(**{name: value for name, value in vars(parser.parse_args()).items() if value is not None})
