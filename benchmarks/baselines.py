"""The figures of docs/baselines.md: the damping of vanilla DDP on DIGITS, and E-MSA on the paper's CNN.

    python benchmarks/baselines.py damping     # results/baselines/damping.csv, ten minutes on one core
    python benchmarks/baselines.py emsa        # results/baselines/emsa.csv, eight steps on 1,000 images of MNIST

Damping: 64-20-20-20-20-10 with tanh, batches of 16, seed 0, accuracy on a fifth of the training data, which is held
out.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median

import torch
import typer
from torch.nn import functional as F

from ddpnopt.lab.baselines import EMSA, VanillaDDP
from ddpnopt.lab.runs.classification import ClassificationTask, evaluate
from ddpnopt.lab.tables import write_csv

OUT = Path(__file__).parents[1] / "results" / "baselines"
RUNS = {30.0: 12, 10.0: 12, 1.0: 6, 50.0: 6}
"""Epochs for each smallest mu."""
app = typer.Typer()


def epochs(smallest: float, number: int) -> Iterator[dict[str, object]]:
    """One row after each epoch."""
    problem = ClassificationTask("digits", "fcn", number, 16).problem(0, validation=True)
    opt = VanillaDDP(problem.model, damping=smallest)
    generator, data = torch.Generator().manual_seed(0), problem.dataset
    for epoch in range(1, number + 1):
        losses, reports = [], []
        problem.model.train()
        for batch in problem.epoch(generator):
            opt.zero_grad()
            loss = problem.loss(batch)
            loss.backward()
            opt.step()
            losses.append(loss.item())
            reports.append((opt.report.tries, opt.report.damping))
        sweeps, dampings = zip(*reports, strict=True)
        yield {
            "smallest mu": f"{smallest:g}",
            "epoch": epoch,
            "accuracy": f"{evaluate(problem.model, data.x_test, data.y_test)[1]:.1f}",
            "loss": f"{fmean(losses):.3f}",
            "sweeps per step": f"{fmean(sweeps):.2f}",
            "median mu": f"{median(dampings):g}",
            "largest mu": f"{max(dampings):g}",
        }


@app.command()
def damping(out: Path = OUT) -> None:
    """Held-out accuracy of vanilla DDP after each epoch, for several smallest mu."""
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    rows = []
    for run in RUNS.items():
        for row in epochs(*run):
            rows.append(row)
            print(*row.values(), flush=True)
            write_csv(out / "damping.csv", rows)


@app.command()
def emsa(out: Path = OUT, data: Path | None = None) -> None:
    """Eight steps of E-MSA with batches of 128."""
    torch.set_num_threads(1)
    problem = ClassificationTask("mnist", "cnn", 1, 128, n_train=1_000).problem(0, data_dir=data)
    opt, found = EMSA(problem.model), problem.dataset
    begun, iterations = time.process_time(), 0
    before = evaluate(problem.model, found.x_train, found.y_train)[0]
    problem.model.train()
    for x, y in problem.epoch(torch.Generator().manual_seed(0)):
        opt.zero_grad()
        F.cross_entropy(problem.model(x), y).backward()
        opt.step()
        iterations += 1
    seconds = (time.process_time() - begun) / iterations
    after = evaluate(problem.model, found.x_train, found.y_train)[0]
    accuracy = evaluate(problem.model, found.x_test, found.y_test)[1]
    out.mkdir(parents=True, exist_ok=True)
    row = {"steps": iterations, "loss before": f"{before:.2f}", "loss after": f"{after:.2f}"}
    write_csv(out / "emsa.csv", [{**row, "test accuracy": f"{accuracy:.1f}", "CPU seconds per step": f"{seconds:.1f}"}])
    print(row, accuracy, seconds)


if __name__ == "__main__":
    app()
