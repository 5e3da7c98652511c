"""Thirty losses, each also times 0.01 and 100: DDPNOpt(model) beside AdamW.

    python benchmarks/losses.py

Writes results/losses/losses.csv, losses.md and docs/losses-table.md. The networks and the data, which come with
scikit-learn, are those of tests/losses.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "losses"))

from loss_runs import FACTORS, RATES, USUAL_RATE, Run, adamw, ddpnopt  # noqa: E402
from loss_tasks import TASKS  # noqa: E402

from ddpnopt.lab.tables import markdown_table  # noqa: E402

STEPS = 300
WITHIN = 0.9  # of AdamW's decrease
HEAD = """# Losses, one by one

`DDPNOpt(model)` and AdamW with {count} losses, {steps} steps each on small networks and small real data (digits,
diabetes and wine of scikit-learn). The figures are losses on all of the training data after the last step. DDPNOpt
trains each loss also multiplied by 0.01 and by 100; the columns show the loss without the factor. *Share* is DDPNOpt's
decrease of the loss (the smallest of the three factors) over that of AdamW at 1e-3, and over that of the best of
{rates} for that loss. *Test* is the error rate or the loss on data held out, for AdamW at its best rate and for
DDPNOpt. One seed.

{summary}

Written by `python benchmarks/losses.py --steps {steps}`; all runs are in `results/losses/losses.csv`.

"""
COLUMNS = (
    "loss",
    "before",
    "AdamW 1e-3",
    "best AdamW",
    "x 1",
    "x 0.01",
    "x 100",
    "share",
    "of the best",
    "test: AdamW, DDPNOpt",
)


def number(x: float) -> str:
    return f"{x:.3g}" if math.isfinite(x) else "not finite"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--only", default="", help="names that contain this")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, lines, shares, alike = [], [], [], []
    for name, task in TASKS.items():
        if options.only not in name:
            continue
        theirs = {rate: adamw(task, options.steps, 1.0, rate) for rate in RATES}
        ours = {factor: ddpnopt(task, options.steps, factor) for factor in FACTORS}
        usual = theirs[USUAL_RATE]
        rate = max(RATES, key=lambda rate: theirs[rate].decrease)
        least = min(run.decrease for run in ours.values())
        share, of_best = least / usual.decrease, least / theirs[rate].decrease
        shares.append((name, share, of_best))
        losses = [ours[factor].after for factor in FACTORS]
        alike.append((max(losses) - min(losses)) / max(run.decrease for run in ours.values()))
        cells = [usual.before, usual.after, theirs[rate].after, *losses, share, of_best]
        tests = f"{number(theirs[rate].figure)}, {number(ours[1.0].figure)}"
        rows.append((name.replace("|", "\\|"), *(number(x) for x in cells), tests))
        lines += [record(name, "AdamW", 1.0, rate, run) for rate, run in theirs.items()]
        lines += [record(name, "DDPNOpt", factor, None, run) for factor, run in ours.items()]
        print(*rows[-1], flush=True)
    counts = [sum(entry[k] >= WITHIN for entry in shares) for k in (1, 2)]
    behind = [f"{name} ({of_best:.2f})" for name, _, of_best in shares if of_best < WITHIN]
    warned = sum(int(line["warnings"]) > 0 for line in lines)
    summary = (
        f"At least {WITHIN:.0%} of AdamW's decrease: {counts[0]} of {len(shares)} at 1e-3, {counts[1]} at its best "
        f"rate. Behind the best rate: {', '.join(behind) or 'none'}. The three factors differ by at most "
        f"{max(alike):.1%} of the decrease. {warned} runs of {3 * len(shares)} gave a warning."
    )
    rates = ", ".join(f"{rate:g}" for rate in RATES)
    head = HEAD.format(count=len(rows), steps=options.steps, rates=rates, summary=summary)
    text = head + markdown_table(COLUMNS, rows) + "\n"
    print(summary)
    if options.only:
        return
    (ROOT / "docs" / "losses-table.md").write_text(text, encoding="utf-8")
    results = ROOT / "results" / "losses"
    results.mkdir(parents=True, exist_ok=True)
    (results / "losses.md").write_text(text, encoding="utf-8")
    with (results / "losses.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)


def record(name: str, method: str, factor: float, rate: float | None, run: Run) -> dict[str, object]:
    numbers = {
        key: f"{value:.6g}" for key, value in (("before", run.before), ("after", run.after), ("test", run.figure))
    }
    counts = {"repeated": run.repeated, "warnings": len(run.messages), "recognised": run.kind or ""}
    return {"loss": name, "method": method, "factor": factor, "rate": rate or "", **numbers, **counts}


if __name__ == "__main__":
    main()
