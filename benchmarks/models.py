"""Write docs/models.md and results/models: every case of tests/models, DDPNOpt(model) beside AdamW at three rates.

python benchmarks/models.py
"""

from __future__ import annotations

import math
import sys
import warnings
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "models"))

from registry import CASES, GROUPS  # noqa: E402
from trial import RATES, USUAL_RATE, Case, adamw, ddpnopt, passes  # noqa: E402

from ddpnopt.lab.tables import markdown_table  # noqa: E402

HEAD = """# Models of others

Small, randomly initialised models of other packages and loops as people write them, trained with `DDPNOpt(model)` and
with AdamW for the same number of steps on the same small data. The numbers are training losses, recomputed on all of
the data in training mode. A case passes if the training loss falls by at least 90 % as much as with AdamW at 3e-3.
`tests/models` runs every case in this way; `python benchmarks/models.py` writes this page.
"""


def row(entry: Case) -> tuple[str, ...]:
    found = {rate: adamw(entry, rate) for rate in RATES}
    name = entry.name.replace("|", "\\|")
    theirs, ours = found[USUAL_RATE], ddpnopt(entry)
    best = min((r.after for r in found.values() if math.isfinite(r.after)), default=math.nan)
    before, usual, lowest = (f"{x:.3g}" for x in (theirs.before, theirs.after, best))
    if ours.refusal is not None:
        return name, str(entry.steps), before, usual, lowest, "refused", entry.fails or f"`{entry.refused}`"
    verdict = "passes" if passes(ours, theirs) else "falls short"
    if ours.shortened:
        verdict += f", {ours.shortened} steps repeated, {ours.undone} undone"
    return name, str(entry.steps), before, usual, lowest, f"{ours.after:.3g}", verdict


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    parts = [HEAD]
    for group in GROUPS:
        rows = [row(entry) for entry in CASES.values() if entry.group == group]
        headings = ("case", "steps", "before", "AdamW 3e-3", "AdamW, best of three", "DDPNOpt", "")
        parts += [f"## {group[0].upper()}{group[1:]}", "", markdown_table(headings, rows), ""]
        print(group, flush=True)
    text = "\n".join(parts)
    (ROOT / "docs" / "models.md").write_text(text, encoding="utf-8")
    results = ROOT / "results" / "models"
    results.mkdir(parents=True, exist_ok=True)
    (results / "models.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
