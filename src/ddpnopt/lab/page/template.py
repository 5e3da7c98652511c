"""The templates of the pages, with the one style sheet and the scripts that they share."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

import ddpnopt
from ddpnopt.lab.page.text import anchor, inline, plain
from ddpnopt.lab.paper.item import Claim

SCRIPTS = ("theme.js", "tables.js", "scale.js", "chart.js")
VERDICTS = {True: "holds", False: "does not", None: "open"}
NOT_JUDGED = "not judged"


def _verdict(claim: Claim) -> str:
    return VERDICTS[claim.holds] if claim.judged else NOT_JUDGED


def render_template(name: str, **content: Any) -> str:
    """A page as text."""
    assets = files(__package__) / "assets"
    environment = Environment(
        loader=PackageLoader(__package__, "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(inline=inline, plain=plain, anchor=anchor, verdict=_verdict)
    return environment.get_template(name).render(
        css=(assets / "page.css").read_text(encoding="utf-8"),
        js="\n".join((assets / each).read_text(encoding="utf-8") for each in SCRIPTS),
        version=ddpnopt.__version__,
        **content,
    )
