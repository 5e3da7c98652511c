"""One bar for each method: on how many tasks it is ahead of tuned Adam, level with it, behind, or fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddpnopt.lab import style
from ddpnopt.lab.suite.comparison import TaskResult, Verdict
from ddpnopt.lab.suite.entrants import REFERENCE, Entrant

# Distinct in grey and for readers who cannot tell red from green.
LOOK = {
    Verdict.AHEAD: ("ahead", "#2f6fbb", "white"),
    Verdict.LEVEL: ("level", "#b9d3ee", style.INK),
    Verdict.BEHIND: ("behind", "#f3c9a5", style.INK),
    Verdict.COLLAPSED: ("fails", "#a63a12", "white"),
}
READABLE = 0.05
"""The least share of a bar that has room for its number."""


def verdicts(results: Sequence[TaskResult], methods: Sequence[Entrant]) -> dict[str, Counter[Verdict]]:
    """The verdicts on each method but the reference, by its label."""
    found: dict[str, Counter[Verdict]] = {}
    for entrant in methods:
        if entrant.name == REFERENCE:
            continue
        judged = [result.verdict(mine) for result in results if (mine := result.results.get(entrant.name))]
        if counts := Counter(verdict for verdict in judged if verdict is not None):
            found[entrant.label] = counts
    return found


def draw(found: Mapping[str, Counter[Verdict]], stem: Path) -> list[Path]:
    """Saves `<stem>.svg`: bars of equal length, since not every method has run on every task."""
    order = sorted(found, key=lambda label: found[label][Verdict.AHEAD] / found[label].total())
    with style.style():
        # Small, with large letters: it is also read on a phone.
        made, [axes] = style.figure(width=5.4, height=0.75 + 0.31 * len(order))
        for place, label in enumerate(order):
            start, total = 0.0, found[label].total()
            for verdict, (_, colour, ink) in LOOK.items():
                share = found[label][verdict] / total
                axes.barh(place, share, left=start, color=colour, height=0.74)
                if share >= READABLE:
                    middle = start + share / 2
                    axes.text(middle, place, f"{found[label][verdict]}", color=ink, ha="center", va="center")
                start += share
        axes.set_yticks(range(len(order)), [f"{label} ({found[label].total()} tasks)" for label in order], fontsize=9.5)
        for text in axes.get_yticklabels():
            text.set_color(style.INK)
            text.set_fontweight("bold" if text.get_text().startswith("DDPNOpt") else "normal")
        axes.set_xlim(0, 1)
        axes.margins(y=0.01)
        axes.set_xticks([])
        axes.grid(visible=False)
        for side in ("left", "bottom"):
            axes.spines[side].set_visible(False)
        patches = [axes.barh(0, 0, color=colour, label=name) for name, colour, _ in LOOK.values()]
        made.legend(handles=patches, loc="outside lower center", ncols=len(LOOK), handlelength=1.0)
        made.suptitle(
            "Compared with Adam at the best of five rates", x=0.01, ha="left", fontsize=10.5, fontweight="bold"
        )
        return style.save(made, stem, ("svg",))
