"""`ddpnopt report`: everything reproduced, on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ddpnopt.lab.cli.errors import one_line_errors
from ddpnopt.lab.cli.progress import console


@one_line_errors
def report(
    results: Annotated[Path, typer.Option(help="Folder with one folder an item.")] = Path("results"),
    out: Annotated[
        Path | None, typer.Option(help="The page; by default report.html in the folder of results.", show_default=False)
    ] = None,
) -> None:
    """Gather all results into one self-contained HTML page."""
    from ddpnopt.lab.page.build import papers_claims, write_page
    from ddpnopt.lab.page.items import MissingItem, ShownItem

    page = out or results / "report.html"
    items = write_page(results, page)
    shown = [item for item in items if isinstance(item, ShownItem)]
    claims = papers_claims(shown)
    screen = console()
    counts = [sum(claim.holds is verdict for claim in claims) for verdict in (True, False, None)]
    screen.print(
        f"{len(shown)} of {len(items)} items; {len(claims)} claims of the paper: {counts[0]} hold, {counts[1]} do not, "
        f"{counts[2]} open",
        highlight=False,
    )
    for item in items:
        if isinstance(item, MissingItem):
            state = "not run to its end" if item.started else "not run"
            screen.print(f"[dim]{item.name}: {state}, `{item.command}` makes it", highlight=False)
    screen.print(f"[dim]saved[/] {page}", soft_wrap=True)
