"""The paper's form of DDPNOpt compared with SGD on DIGITS: mean training loss over seeds, at several learning rates.

Set-up: 64-20-20-20-20-10 with tanh, inputs standardised, 80/20 split, batch 8, PyTorch's default initialisation. The
paper's form is value="full" with the exact Hessian of the cross-entropy and M = I. Run:

    python benchmarks/paper_form_on_digits.py            # ten seeds, learning rates 0.1, 0.4, 0.6, ten epochs

prints the table and writes it to results/paper-form/paper-form.csv.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from ddpnopt.lab.runs.classification import ClassificationTask
from ddpnopt.lab.runs.config import RunConfig
from ddpnopt.lab.runs.store import STORE, Store
from ddpnopt.lab.runs.sweep import collect
from ddpnopt.lab.tables import Spread, screen_table, write_csv

FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("sgd", {}),
    "DDPNOpt, M = I": ("ddpnopt-sgd", {}),
    "without the guard": ("ddpnopt-sgd", {"guard": False}),
}


def main(
    seeds: int = 10,
    epochs: int = 10,
    lrs: str = "0.1,0.4,0.6",
    jobs: int = 2,
    out: Path = Path("results/paper-form"),
) -> None:
    """Print and write the table; an interrupted run continues from the store in `out`."""
    task = ClassificationTask("digits", "fcn", epochs, 8)
    rates = [float(lr) for lr in lrs.split(",")]
    wanted = {
        (lr, form): [RunConfig(method, task, lr, options, seed) for seed in range(seeds)]
        for lr in rates
        for form, (method, options) in FORMS.items()
    }
    out.mkdir(parents=True, exist_ok=True)
    found = collect([config for configs in wanted.values() for config in configs], Store(out / STORE), jobs=jobs)
    rows = [
        [f"{lr:g}", *(Spread.of(found[c].train_loss for c in wanted[lr, form]).text(4) for form in FORMS)]
        for lr in rates
    ]
    headings = ["learning rate", *FORMS]
    write_csv(out / "paper-form.csv", [dict(zip(headings, row, strict=True)) for row in rows])
    title = f"Training loss on DIGITS after {epochs} epochs, mean ± deviation over {seeds} seeds"
    Console().print(screen_table(title, headings, rows))


if __name__ == "__main__":
    typer.run(main)
