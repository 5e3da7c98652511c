"""The paper's form of DDPNOpt beside SGD on DIGITS: mean training loss over seeds, at several learning rates.

Set-up: 64-20-20-20-20-10 with tanh, inputs standardised, 80/20 split, batch 8, PyTorch's default initialisation. The
paper's form is value="full" with the exact Hessian of the cross-entropy and M = I. Run:

    python benchmarks/paper_form_on_digits.py            # ten seeds, learning rates 0.1, 0.4, 0.6, ten epochs
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from statistics import mean, stdev

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

METHODS = ("sgd", "ddpnopt-sgd", "ddpnopt-sgd, no guard")


def train_loss(job: tuple[str, float, int, int]) -> float:
    import torch

    from ddpnopt.lab.runs.training import RunConfig, train

    torch.set_num_threads(1)
    method, lr, seed, epochs = job
    name, _, no_guard = method.partition(",")
    options = {"guard": False} if no_guard else {}
    config = RunConfig(name, "digits", "fcn", lr, options, seed=seed, epochs=epochs, batch_size=8)
    return train(config).train_loss


def main(seeds: int = 10, epochs: int = 10, lrs: str = "0.1,0.4,0.6", processes: int = 2) -> None:
    """Print the table."""
    rates = [float(lr) for lr in lrs.split(",")]
    jobs = [(method, lr, seed, epochs) for lr in rates for method in METHODS for seed in range(seeds)]
    with ProcessPoolExecutor(processes) as pool:
        losses = dict(zip(jobs, track(pool.map(train_loss, jobs), "Training", len(jobs)), strict=True))
    table = Table(title=f"Training loss on DIGITS after {epochs} epochs, mean ± deviation over {seeds} seeds")
    table.add_column("learning rate", justify="right")
    for name in ("SGD", "DDPNOpt, M = I", "the same without guard"):
        table.add_column(name, justify="right")
    for lr in rates:
        runs = [[losses[method, lr, seed, epochs] for seed in range(seeds)] for method in METHODS]
        table.add_row(f"{lr:g}", *(f"{mean(r):.4f} ± {stdev(r):.4f}" for r in runs))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
