"""The site builds without a warning, and what the documents point to is there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="the site needs pip install 'ddpnopt[docs]'")
    out = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},  # an advertisement, not a warning about the site
    )
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr, built.stderr
    return out


def test_the_site_builds_without_a_warning_and_has_every_page(site: Path) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        assert (site / page.relative_to(ROOT / "docs").with_suffix(".html")).is_file()


def test_the_reference_is_made_from_the_docstrings(site: Path) -> None:
    text = (site / "api" / "optimizer.html").read_text(encoding="utf-8")
    assert "fraction of each sample's loss that a step of" in text.replace("&#39;", "'")
    assert text.count("<code>on_nonfinite</code>") >= 1


def test_the_pages_ask_nothing_of_the_network(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not re.findall(r"<(?:script|img|link)[^>]+(?:src|href)=\"?(https?://[^\" >]+)", text), page


def test_everything_the_readme_links_to_exists() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#]+)", text) + re.findall(r'<img src="([^"]+)"', text)
    local = [link for link in links if "://" not in link]
    assert local
    assert [link for link in local if not (ROOT / link).exists()] == []


def test_the_map_from_paper_to_code_names_what_exists() -> None:
    text = (ROOT / "docs" / "paper-to-code.md").read_text(encoding="utf-8")
    names = re.findall(r"`(ddpnopt\.[A-Za-z_.]+)`", text)
    tests = re.findall(r"`(tests/[A-Za-z_/.]+)`", text)
    assert len(names) > 25
    assert [name for name in names if not _exists(name)] == []
    assert [path for path in tests if not (ROOT / path).exists()] == []


def _exists(dotted: str) -> bool:
    import pkgutil

    try:
        pkgutil.resolve_name(dotted)
    except (ImportError, AttributeError):
        return False
    return True
