"""Figures inside the page, as data: an SVG in an <img> can neither run code nor mix its ids with another's."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path

LARGEST_SVG = 400_000
"""Bytes; a scatter of thousands of marks is smaller, and quicker to show, as a PNG."""
TYPES = {".svg": "image/svg+xml", ".png": "image/png"}


@dataclass(frozen=True)
class ShownImage:
    """A figure ready for the template; without `source` its files are not there."""

    name: str
    caption: str
    source: str | None


def read_image(stem: Path, caption: str) -> ShownImage:
    """`<stem>.svg` or `<stem>.png`, whichever suits the page."""
    svg, png = (stem.with_name(f"{stem.name}{suffix}") for suffix in (".svg", ".png"))
    present = [path for path in (svg, png) if path.is_file() and path.stat().st_size]
    if len(present) == 2 and svg.stat().st_size > LARGEST_SVG and png.stat().st_size < svg.stat().st_size:
        present = [png]
    return ShownImage(stem.name, caption, _data(present[0]) if present else None)


def _data(path: Path) -> str:
    return f"data:{TYPES[path.suffix]};base64,{base64.b64encode(path.read_bytes()).decode()}"
