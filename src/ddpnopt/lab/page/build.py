"""Puts the page together: one file, with its style, script and figures inside."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

import ddpnopt
from ddpnopt.lab.errors import ExperimentError
from ddpnopt.lab.page.benches import ShownBench, read_benches
from ddpnopt.lab.page.items import MissingItem, ShownItem, read_items
from ddpnopt.lab.page.text import anchor, inline, plain
from ddpnopt.lab.paper.item import Claim

SCRIPTS = ("theme.js", "tables.js", "scale.js", "chart.js")
VERDICTS = {True: "holds", False: "does not", None: "open"}


def write_page(results: Path, out: Path) -> list[ShownItem | MissingItem]:
    """Reads the folders below `results` and writes the page; returns what is on it."""
    if not results.is_dir():
        raise ExperimentError(f"--results: there is no folder {results}; `ddpnopt reproduce all` writes one.")
    items = read_items(results)
    text = render(items, read_benches(results))
    part = out.with_name(f"{out.name}.part")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        part.replace(out)  # whole or not at all
    except OSError as failed:
        reason = os.strerror(failed.errno) if failed.errno else str(failed)
        raise ExperimentError(f"--out: cannot write {out}: {reason}") from failed
    return items


def papers_claims(items: Sequence[ShownItem]) -> list[Claim]:
    """Those that count: what the package claims of itself is shown with its item alone."""
    return [claim for item in items for claim in item.claims if claim.of_paper]


def render(items: list[ShownItem | MissingItem], benches: list[ShownBench]) -> str:
    """The page as text."""
    assets = files(__package__) / "assets"
    environment = Environment(
        loader=PackageLoader(__package__, "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(inline=inline, plain=plain, anchor=anchor, verdict=lambda holds: VERDICTS[holds])
    shown = [item for item in items if isinstance(item, ShownItem)]
    claims = papers_claims(shown)
    return environment.get_template("page.html.j2").render(
        items=shown,
        missing=[item for item in items if isinstance(item, MissingItem)],
        benches=benches,
        counts=Counter(VERDICTS[claim.holds] for claim in claims),
        verdicts=list(VERDICTS.values()),
        total=len(claims),
        css=(assets / "page.css").read_text(encoding="utf-8"),
        js="\n".join((assets / name).read_text(encoding="utf-8") for name in SCRIPTS),
        version=ddpnopt.__version__,
    )
