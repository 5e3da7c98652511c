"""Puts the page together: one file, with its style, script and figures inside."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ddpnopt.lab.errors import ExperimentError
from ddpnopt.lab.page.benches import ShownBench, read_benches
from ddpnopt.lab.page.items import MissingItem, ShownItem, read_items
from ddpnopt.lab.page.template import VERDICTS, render_template
from ddpnopt.lab.paper.item import Claim


def write_page(results: Path, out: Path) -> list[ShownItem | MissingItem]:
    """Reads the folders below `results` and writes the page; returns what is on it."""
    if not results.is_dir():
        raise ExperimentError(f"--results: there is no folder {results}; `ddpnopt reproduce all` writes one.")
    items = read_items(results)
    write_whole(out, render(items, read_benches(results)))
    return items


def write_whole(out: Path, text: str) -> None:
    """The file, whole or not at all."""
    part = out.with_name(f"{out.name}.part")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        part.replace(out)
    except OSError as failed:
        reason = os.strerror(failed.errno) if failed.errno else str(failed)
        raise ExperimentError(f"--out: cannot write {out}: {reason}") from failed


def papers_claims(items: Sequence[ShownItem]) -> list[Claim]:
    """Those that count: not what the package claims of itself, nor what this machine cannot judge."""
    return [claim for item in items for claim in item.claims if claim.counted]


def render(items: list[ShownItem | MissingItem], benches: list[ShownBench]) -> str:
    """The page as text."""
    shown = [item for item in items if isinstance(item, ShownItem)]
    claims = papers_claims(shown)
    return render_template(
        "page.html.j2",
        items=shown,
        missing=[item for item in items if isinstance(item, MissingItem)],
        benches=benches,
        counts=Counter(VERDICTS[claim.holds] for claim in claims),
        verdicts=list(VERDICTS.values()),
        total=len(claims),
        unjudged=sum(claim.of_paper and not claim.judged for item in shown for claim in item.claims),
    )
