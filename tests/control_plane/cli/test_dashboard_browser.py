"""The page of `foveal dashboard` in a real browser: nothing is asked for, nothing complains, and
what is drawn is what was measured. Chromium comes from the machine's packages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foveal_operator.cli.dashboard import layout
from foveal_operator.cli.dashboard.promql.evaluate import ask
from foveal_operator.observability.panel import Panel, Unit
from tests.support import browser
from tests.support.dashboard_page import world_page, world_store

CHROMIUM = browser.find()
pytestmark = [
    pytest.mark.extended,
    pytest.mark.timeout(300),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium (Debian's package: chromium)"),
]

_CHARTS = """
const lines = '.chart[data-panel]:not(.heat):not(.buckets)';
JSON.stringify([...document.querySelectorAll(lines)].map(card => ({
  title: card.dataset.panel,
  right: card.getBoundingClientRect().right,
  parts: [...card.querySelectorAll('.part')].map(part => ({
    width: part.querySelector('.plot').getBoundingClientRect().width,
    plot: [...part.querySelectorAll('path.line')].map(path => {
      const box = path.getBoundingClientRect(), style = getComputedStyle(path);
      return {width: box.width, height: box.height, colour: style.stroke,
              last: path.getAttribute('d').split(/[ M]/).pop().split(',').map(Number)};
    }),
    areas: part.querySelectorAll('path.area').length,
    words: [...part.querySelectorAll('.plot text')].map(text => text.textContent),
    legend: [...part.querySelectorAll('li[data-series]')].map(item => ({
      name: item.dataset.series, last: Number(item.dataset.last), text: item.innerText})),
  })),
})))
"""
_CELLS = """
JSON.stringify([...document.querySelectorAll('.heat td[data-value]')].map(cell => ({
  value: Number(cell.dataset.value), text: cell.innerText,
  opacity: Number(getComputedStyle(cell).backgroundColor.match(/[\\d.]+/g)[3] ?? 1),
  right: cell.closest('.card').getBoundingClientRect().right})))
"""
_BACKGROUND = "getComputedStyle(document.body).backgroundColor"


async def _look(tmp_path: Path, width: int, dark: bool) -> tuple[list[dict[str, Any]], str]:
    file = tmp_path / "page.html"
    file.write_text(world_page(), encoding="utf-8")
    assert CHROMIUM is not None
    async with browser.tab(CHROMIUM) as tab:
        await tab.open(file.as_uri(), width, dark)
        assert tab.complaints == []
        assert tab.requests == [file.as_uri()]
        assert await tab.value("document.documentElement.scrollWidth") <= width
        assert await tab.value("document.documentElement.scrollHeight") > 2000
        found = json.loads(await tab.value(_CHARTS))
        cells = json.loads(await tab.value(_CELLS))
        background = str(await tab.value(_BACKGROUND))
        assert tab.complaints == []
    _the_more_the_darker(cells, width)
    return found, background


def _the_more_the_darker(cells: list[dict[str, Any]], width: int) -> None:
    assert len(cells) == 4
    assert all(cell["right"] <= width for cell in cells)
    assert all(cell["text"].endswith("%") for cell in cells)
    ordered = sorted(cells, key=lambda cell: cell["value"])
    assert [cell["opacity"] for cell in ordered] == sorted(cell["opacity"] for cell in cells)
    assert len({cell["opacity"] for cell in cells}) > 1


@pytest.mark.parametrize(("width", "dark"), [(1440, False), (390, True)])
async def test_the_page_in_a_browser(tmp_path: Path, width: int, dark: bool) -> None:
    charts, background = await _look(tmp_path, width, dark)
    panels = {
        panel.title: panel
        for section in layout.SECTIONS
        for panel in section.panels
        if panel.shape == "timeseries"
    }
    assert sorted(chart["title"] for chart in charts) == sorted(panels)
    for chart in charts:
        panel = panels[chart["title"]]
        assert chart["right"] <= width
        units = list(dict.fromkeys(query.unit for query in panel.queries))
        for unit, part in zip(units, chart["parts"], strict=True):
            _part_is_the_panels(part, panel, unit, width)
    darkness = sum(int(part) for part in background[4:-1].split(","))
    assert (darkness < 150) == dark


def _part_is_the_panels(part: dict[str, Any], panel: Panel, unit: Unit | None, width: int) -> None:
    """One plot for each unit, with the lines of the queries of that unit."""
    assert 250 < part["width"] < width
    assert len(part["words"]) >= 3, panel.title
    assert part["plot"], panel.title
    assert len({line["colour"] for line in part["plot"]}) == len(part["plot"])
    assert all(line["width"] > 100 for line in part["plot"]), panel.title
    assert part["areas"] == (len(part["plot"]) if panel.stacked else 0)
    store = world_store()
    end = store.times[-1]
    real = sorted(
        line.newest(end)
        for query in panel.queries
        if query.unit == unit
        for line in ask(store, layout.Chosen().fill(query.expr), [end])
    )
    shown = sorted(item["last"] for item in part["legend"])
    assert all(any(value == pytest.approx(one) for one in real) for value in shown)
    assert len(shown) == min(8, len(real)), panel.title
    if not panel.stacked:
        _heights_are_the_values(part, panel.title)


def _heights_are_the_values(part: dict[str, Any], title: str) -> None:
    """The higher the newest value, the higher its end of the line, in proportion."""
    ends = [
        (item["last"], line["last"][1])
        for item, line in zip(part["legend"], part["plot"], strict=True)
        if line["last"][0] >= 999
    ]
    low, high = min(ends), max(ends)
    for value, y in ends:
        if high[0] > low[0]:
            share = (value - low[0]) / (high[0] - low[0])
            assert y == pytest.approx(low[1] + share * (high[1] - low[1]), abs=0.3), title
