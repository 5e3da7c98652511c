"""One folder of results for all tests of the page, and a browser where there is one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from page_results import write_grid, write_speed, write_table3, write_toy

from ddpnopt.lab.page.build import write_page

# Without the switches for the background a closed network answers Chromium's own connections with noise.
SWITCHES = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three items, one of them half done, and the measurements of speed."""
    folder = tmp_path_factory.mktemp("results")
    write_grid(folder)
    write_table3(folder)
    write_toy(folder)
    (folder / "fig-adam").mkdir()
    (folder / "fig-adam" / "losses.csv").write_text("lr,loss\n", encoding="utf-8")
    write_speed(folder)
    return folder


@pytest.fixture(scope="session")
def page(results: Path) -> Path:
    out = results / "report.html"
    write_page(results, out)
    return out


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(executable_path=chromium, args=list(SWITCHES))
        yield running
        running.close()
