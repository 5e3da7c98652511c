"""Takes figures and the page of results from `results/`, so that each is in the repository once.

A page refers to them as a reader of the repository would, `../results/lr-window/ablations-digits.svg`; in the site they
are in the folder `results`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

_OUTSIDE = re.compile(r"\((?P<up>(?:\.\./)*)\.\./(?P<path>results/[^)\s]+\.(?:svg|html))(?P<part>#[\w-]+)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the figures that a page shows."""
    root = Path(config.docs_dir).parent
    pages = [file.content_string for file in files.documentation_pages()]
    for path in sorted({found["path"] for text in pages for found in _OUTSIDE.finditer(text)}):
        if (root / path).is_file():  # a missing one is a broken link, which a strict build reports
            files.append(File.generated(config, path, abs_src_path=str(root / path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The folder of results is one level higher in the site than in the repository."""
    return _OUTSIDE.sub(lambda found: f"({found['up']}{found['path']}{found['part'] or ''})", markdown)
