"""The curves of a run as a page: one file, with the style and the charts of the page of results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ddpnopt.lab.page.build import write_whole
from ddpnopt.lab.page.charts import chart
from ddpnopt.lab.page.template import render_template
from ddpnopt.lab.view.curves import CurvePanel, binned, panels
from ddpnopt.lab.view.run_log import RunLog
from ddpnopt.lab.view.symptoms import symptoms

POINTS = 400
"""Of a line: more cannot be told apart on a screen."""


def write_view(log: RunLog, out: Path) -> None:
    """Write the page of a run."""
    shown = [{"panel": panel, "chart": _chart(log, panel)} for panel in panels(log)]
    facts = [
        ("Steps", f"{log.steps[-1]:,}"),
        ("Seconds", f"{log.final('seconds'):.1f}"),
        ("Loss", (log.kind or "–").replace("_", " ")),
    ]
    write_whole(out, render_template("view.html.j2", log=log, shown=shown, symptoms=symptoms(log), run_facts=facts))


def _chart(log: RunLog, panel: CurvePanel) -> dict[str, Any]:
    series = []
    for line in panel.lines:
        places, values = binned(log.steps, line.values, POINTS)
        series.append({"label": line.label, "x": places, "y": values, "x_label": "step"})
    made = chart(series)
    for each in made["panels"]:
        each["logX"] = False
        each["logY"] = panel.logarithmic
    return made
