"""The page in a real browser: what a reader sees and can do, on a desk, on a phone and without a mouse."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PHONE = {"width": 360, "height": 740}
DESK = {"width": 1280, "height": 900}


class Opened:
    """The page in a tab, and everything it complained of or asked for."""

    def __init__(self, browser: Any, page: Path, viewport: dict[str, int], scheme: str = "light") -> None:
        self.tab = browser.new_page(viewport=viewport, color_scheme=scheme, reduced_motion="reduce")
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.tab.on("console", lambda message: self.complaints.append(message.text))
        self.tab.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.tab.on("request", lambda request: self.requests.append(request.url))
        self.tab.goto(page.as_uri())

    def chart(self, item: str) -> Any:
        return self.tab.locator(f"#{item} .chart")


@pytest.fixture
def desk(browser: Any, page: Path) -> Iterator[Opened]:
    opened = Opened(browser, page, DESK)
    yield opened
    opened.tab.close()


@pytest.fixture
def phone(browser: Any, page: Path) -> Iterator[Opened]:
    opened = Opened(browser, page, PHONE)
    yield opened
    opened.tab.close()


def test_the_page_complains_of_nothing_and_asks_nothing_of_the_network(desk: Opened, page: Path) -> None:
    desk.tab.wait_for_function("[...document.images].every(image => image.complete && image.naturalWidth > 0)")
    assert desk.complaints == []
    assert [url for url in desk.requests if not url.startswith("data:")] == [page.as_uri()]


def test_the_summary_has_every_claim_with_its_verdict_and_a_link_that_leads_there(desk: Opened) -> None:
    rows = desk.tab.locator("#claims tr[data-verdict]")
    assert rows.count() == 3
    assert rows.nth(1).locator(".badge").first.inner_text() == "holds"
    assert rows.nth(1).locator("td").nth(2).inner_text() == "0.39 → 0.05"
    for link in desk.tab.locator("a[href^='#']").all():
        assert desk.tab.locator(link.get_attribute("href")).count() == 1


def test_hovering_a_chart_shows_the_values_there(desk: Opened) -> None:
    chart = desk.chart("fig-grid")
    readout = chart.locator(".readout")
    assert not readout.is_visible()
    chart.scroll_into_view_if_needed()
    box = chart.locator(".plot").bounding_box()
    desk.tab.mouse.move(box["x"] + box["width"] - 25, box["y"] + 100)
    assert readout.is_visible()
    assert readout.locator("caption").inner_text() == "learning rate = 1.6"
    assert readout.locator("tr").all_inner_texts() == ["EKFAC\t0.916 ± 0.1832", "DDPNOpt\t0.532 ± 0.1064"]
    desk.tab.mouse.move(5, 5)
    assert not readout.is_visible()


def test_arrow_keys_read_a_chart_aloud(desk: Opened) -> None:
    chart = desk.chart("fig-grid")
    chart.locator(".plot").focus()
    desk.tab.keyboard.press("ArrowRight")
    desk.tab.keyboard.press("ArrowRight")
    spoken = chart.locator("[aria-live]")
    assert spoken.inner_text().startswith("learning rate = 0.2: SGD 0.04 ± 0.008")
    desk.tab.keyboard.press("End")
    assert spoken.inner_text().startswith("learning rate = 1.6")
    desk.tab.keyboard.press("Escape")
    assert not chart.locator(".readout").is_visible()


def test_choosing_a_panel_draws_the_other_data_set(desk: Opened) -> None:
    chart = desk.chart("fig-grid")
    before = chart.locator("polyline").first.get_attribute("points")
    chart.locator("select").select_option("WINE")
    chart.locator(".plot").focus()
    desk.tab.keyboard.press("Home")
    assert "SGD 0.0075 ± 0.0015" in chart.locator("[aria-live]").inner_text()
    chart.locator(".legend button").first.click()
    assert chart.locator("polyline").count() == 2
    assert chart.locator("polyline").first.get_attribute("points") != before


def test_the_scale_can_be_made_logarithmic(desk: Opened) -> None:
    chart = desk.chart("fig-grid")
    before = chart.locator("polyline").first.get_attribute("points")
    button = chart.get_by_role("button", name="Logarithmic")
    button.click()
    assert button.get_attribute("aria-pressed") == "true"
    assert chart.locator("polyline").first.get_attribute("points") != before


def test_tables_sort_by_number_with_gaps_last_and_show_one_data_set(desk: Opened) -> None:
    head = desk.tab.locator("#table3 table.data thead th").nth(6)
    column = desk.tab.locator("#table3 table.data tbody td:nth-child(7)")
    head.get_by_role("button").click()
    assert column.all_inner_texts()[:3] == ["9.00 ± 1.0", "12.5 ± 0.1", "–"]
    head.get_by_role("button").click()
    assert head.get_attribute("aria-sort") == "descending"
    assert column.all_inner_texts()[:3] == ["12.5 ± 0.1", "9.00 ± 1.0", "–"]
    desk.tab.locator("#fig-grid .tablebox select").select_option("WINE")
    assert {row.split("\t")[0] for row in desk.tab.locator("#fig-grid tbody tr:visible").all_inner_texts()} == {"WINE"}


def test_the_summary_can_be_narrowed_to_one_verdict(desk: Opened) -> None:
    desk.tab.locator(".tile.does-not").click()
    assert desk.tab.locator("#claims tr[data-verdict]:visible").count() == 1
    assert desk.tab.locator("#claims tr.group:visible").count() == 1, "a part without such a claim is not named"
    desk.tab.locator(".tile.does-not").click()
    assert desk.tab.locator("#claims tr[data-verdict]:visible").count() == 3


def test_the_keyboard_reaches_every_control_and_shows_where_it_is(desk: Opened) -> None:
    desk.tab.keyboard.press("Tab")
    assert desk.tab.evaluate("document.activeElement.className") == "skip"
    assert desk.tab.evaluate("document.activeElement.getBoundingClientRect().top") >= 0
    seen, bare = set(), []
    for _ in range(200):
        name, outline = desk.tab.evaluate(
            "(() => { const e = document.activeElement;"
            " return [e.tagName + '.' + e.className, getComputedStyle(e).outlineStyle]; })()"
        )
        if name.startswith("BODY"):
            break
        seen.add(name)
        bare += [name] if outline == "none" else []
        desk.tab.keyboard.press("Tab")
    assert {"BUTTON.quiet", "BUTTON.tile holds", "SELECT.", "DIV.plot", "DIV.scroll", "BUTTON.toggle", "A.save"} <= seen
    assert bare == []


@pytest.mark.parametrize("width", [320, 360, 768, 1280])
def test_no_width_of_screen_makes_the_page_scroll_sideways(phone: Opened, width: int) -> None:
    phone.tab.set_viewport_size({"width": width, "height": 740})
    assert phone.tab.evaluate("document.documentElement.scrollWidth") <= width
    table = phone.tab.locator("#table3 .scroll")
    assert table.evaluate("e => getComputedStyle(e).overflowX") == "auto"


def test_a_finger_on_a_chart_of_a_phone_reads_a_value(phone: Opened) -> None:
    plot = phone.chart("table3").locator(".plot")
    plot.dispatch_event("pointerdown", {"clientX": plot.bounding_box()["x"] + 70, "clientY": 0, "pointerType": "touch"})
    assert plot.locator(".readout caption").inner_text() == "WINE"
    box = plot.locator(".readout").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= PHONE["width"]


def test_dark_follows_the_system_and_the_button_overrules_it(browser: Any, page: Path) -> None:
    opened = Opened(browser, page, DESK, scheme="dark")

    def luminance() -> float:
        return opened.tab.evaluate("parseFloat(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])")

    assert luminance() < 60
    opened.tab.locator("#theme").click()
    assert luminance() > 200
    opened.tab.locator("#theme").click()
    assert opened.tab.locator("#theme").inner_text() == "Theme: dark"
    assert luminance() < 60
    opened.tab.close()


def test_missing_and_half_done_items_are_said(desk: Opened) -> None:
    text = desk.tab.locator("#missing").inner_text()
    assert "Compared with Adam: started, but not run to its end. ddpnopt reproduce fig-adam" in text
    assert "Vanishing gradients: not run." in text


def test_the_measurements_are_there_and_one_network_can_be_chosen(desk: Opened) -> None:
    assert desk.tab.locator("#bench-speed .tablebox:visible").count() == 3
    desk.tab.locator("#bench-speed-choice").select_option("CNN, batch size 128")
    assert desk.tab.locator("#bench-speed .tablebox:visible").count() == 1
