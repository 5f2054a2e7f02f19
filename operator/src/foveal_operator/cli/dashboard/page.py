"""The page: headlines, charts and tables as one HTML text that needs nothing else. Pure.

Used by job.py. No script; the policy in the head allows the page's own style sheet and
nothing from anywhere.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Callable, Sequence
from html import escape

import msgspec

from foveal_operator.cli.dashboard.chart import chart, named_lines, sparkline
from foveal_operator.cli.dashboard.heat import heat
from foveal_operator.cli.dashboard.layout import HEADLINES, SECTIONS, Figure, Section, Tile
from foveal_operator.cli.dashboard.page_style import STYLE
from foveal_operator.cli.dashboard.promql.samples import Line
from foveal_operator.cli.dashboard.scales import clock_text, text_of
from foveal_operator.cli.dashboard.tables import table
from foveal_operator.observability.panel import Panel

Ask = Callable[[str], Sequence[Line]]
"""From a query of the layout (variables filled in by the caller) to its answer."""

_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
POLICY = f"default-src 'none'; style-src 'sha256-{_HASH}'; img-src data:; base-uri 'none'; " \
         "form-action 'none'"  # fmt: skip


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What stands around the figures.

    Attributes:
        subject: whose figures: a resource, a namespace, or processes.
        source: where from.
        notes: what the reader must know.
        refresh_seconds: the browser asks again after so long; 0 = never.
    """

    subject: str
    source: str
    window_seconds: float
    version: str = ""
    notes: tuple[str, ...] = ()
    refresh_seconds: int = 0


def page(about: About, times: Sequence[float], ask: Ask) -> str:
    """The whole document."""
    refresh = (
        f'<meta http-equiv="refresh" content="{about.refresh_seconds}">'
        if about.refresh_seconds
        else ""
    )
    tiles = "".join(_tile(tile, times, ask) for tile in HEADLINES)
    sections = "".join(_section(section, times, ask) for section in SECTIONS)
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in about.notes)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">{refresh}'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>Foveal: {escape(about.subject)}</title>'
        f"<style>{STYLE}</style></head><body><main>"
        f"<header><h1>Foveal</h1><p>{escape(about.subject)}</p>"
        f"<p>{_span(times)}</p><p>{escape(about.source)}</p></header>"
        f'{notes}<div class="tiles">{tiles}</div>{sections}'
        f"<footer>{_foot(about)}</footer></main></body></html>\n"
    )


def _span(times: Sequence[float]) -> str:
    if not times:
        return "no time"
    length = text_of(times[-1] - times[0], "s")
    return f"{length} until {clock_text(times[-1])}"


def _foot(about: About) -> str:
    window = text_of(about.window_seconds, "s")
    version = f" {about.version}" if about.version else ""
    return escape(
        f"foveal{version} dashboard. Rates and quantiles are taken over {window}; times are UTC. "
        "Numbers beside names are the newest values. Queries are those of the Grafana dashboards."
    )


def newest(lines: Sequence[Line], times: Sequence[float]) -> float:
    """The newest value of an answer with one series; NaN without any."""
    return lines[0].newest(times[-1]) if lines and times else math.nan


def _tile(tile: Tile, times: Sequence[float], ask: Ask) -> str:
    lines = ask(tile.main.expr)
    value = newest(lines, times)
    label = f" <small>{escape(tile.main.label)}</small>" if tile.main.label else ""
    small = "".join(_small(figure, times, ask) for figure in tile.more)
    points = lines[0].points if lines else ()
    return (
        f'<section class="card tile" data-tile="{escape(tile.title)}" data-value="{value!r}">'
        f'<h3 title="{escape(tile.about)}">{escape(tile.title)}</h3>'
        f'<div class="main {_level(tile.main, value)}">{text_of(value, tile.main.unit)}'
        f"{label}</div><dl>{small}</dl>{sparkline(points, times)}</section>"
    )


def _small(figure: Figure, times: Sequence[float], ask: Ask) -> str:
    value = newest(ask(figure.expr), times)
    return (
        f'<div><dt>{escape(figure.label)}</dt><dd class="{_level(figure, value)}" '
        f'data-value="{value!r}">{text_of(value, figure.unit)}</dd></div>'
    )


def _level(figure: Figure, value: float) -> str:
    """As Grafana colours it; where `bad` is the smaller bound, less is worse."""
    if figure.warn is None or figure.bad is None or math.isnan(value):
        return ""
    if figure.bad < figure.warn:
        return "bad" if value < figure.bad else "warn" if value < figure.warn else ""
    return "bad" if value >= figure.bad else "warn" if value >= figure.warn else ""


def _section(section: Section, times: Sequence[float], ask: Ask) -> str:
    if section.kind == "tables":
        inner = "".join(table(one, times, ask) for one in section.tables)
    else:
        inner = "".join(_panel(panel, times, ask) for panel in section.panels)
    return f'<h2>{escape(section.title)}</h2><div class="{section.kind}">{inner}</div>'


def _panel(panel: Panel, times: Sequence[float], ask: Ask) -> str:
    if panel.shape == "pairs":
        return heat(panel, ask(panel.queries[0].expr), times)
    parts = []
    for own in dict.fromkeys(query.unit for query in panel.queries):  # an axis each
        part = msgspec.structs.replace(
            panel, queries=tuple(query for query in panel.queries if query.unit == own)
        )
        answers = [ask(query.expr) for query in part.queries]
        parts.append((own or panel.unit, named_lines(part, answers, times)))
    return chart(panel, parts, times)
