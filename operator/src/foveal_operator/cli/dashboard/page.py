"""The page: headlines, charts and tables as one HTML text that needs nothing else. Pure.

Used by run.py. No script; the policy in the head allows the page's own style sheet and
nothing from anywhere. Colours are classes of that sheet, for light and dark.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Callable, Sequence
from html import escape

import msgspec

from foveal_operator.cli.dashboard.chart import (
    NUM_STEPS,
    bucket_map,
    card,
    chart,
    heat,
    named_lines,
    sparkline,
)
from foveal_operator.cli.dashboard.layout import CHOICE, Contents, Figure, Tile
from foveal_operator.cli.dashboard.promql.samples import Line
from foveal_operator.cli.dashboard.scales import clock_text, text_of
from foveal_operator.observability.panel import Panel, Query, Row, Unit

_LIGHT = ("#2563c9", "#d9730d", "#1a9a74", "#b8408f", "#7a5cc8", "#9a8500", "#2b9fc4", "#8a5a3c")
_DARK = ("#6ea8ff", "#ffa552", "#46cfa4", "#f07fc4", "#b39dff", "#d9c53f", "#67d0f0", "#c99a78")

_SHEET = """
:root{color-scheme:light dark;--bg:#f5f6f8;--card:#fff;--ink:#1b2330;--soft:#5c6778;
--rule:#e3e7ed;--base:#aab4c2;--good:#177a50;--warn:#a15c00;--bad:#c02b2b;LIGHT}
@media (prefers-color-scheme:dark){:root{--bg:#0f141b;--card:#181f29;--ink:#e6ebf2;--soft:#98a4b5;
--rule:#2a3442;--base:#566375;--good:#4fd09a;--warn:#f0b04c;--bad:#ff7a76;DARK}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--bg);color:var(--ink);
font:15px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1500px;margin:0 auto;padding:24px 28px 40px}
header{display:flex;flex-wrap:wrap;gap:4px 24px;align-items:baseline;margin-bottom:18px}
h1{font-size:22px;font-weight:650;margin:0;letter-spacing:-.01em}
header p,footer{margin:0;color:var(--soft);font-size:13px;overflow-wrap:anywhere}
h2{font-size:15px;font-weight:650;margin:30px 0 10px}
.note{border-left:3px solid var(--warn);padding:6px 12px;margin:0 0 12px;background:var(--card);
font-size:13px;overflow-wrap:anywhere}
.card{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:14px 16px;
min-width:0}
.tiles{display:grid;gap:12px;grid-template-columns:repeat(4,minmax(0,1fr))}
.tile{display:flex;flex-direction:column}
.tile h3{margin:0;font-size:13px;font-weight:550;color:var(--soft)}
.tile .main{font-size:27px;line-height:1.2;font-weight:650;margin:4px 0 2px;
font-variant-numeric:tabular-nums;letter-spacing:-.02em;white-space:nowrap}
.tile .main small{font-size:13px;font-weight:500;color:var(--soft);letter-spacing:0}
.tile dl{margin:0 0 8px;font-size:12.5px;color:var(--soft)}
.tile dl div{display:flex;justify-content:space-between;gap:8px}
.tile dd{margin:0;color:var(--ink);font-variant-numeric:tabular-nums;white-space:nowrap}
.tile .spark{margin-top:auto}
.warn{color:var(--warn)}.bad{color:var(--bad)}
.charts{display:grid;gap:12px;grid-template-columns:repeat(auto-fit,minmax(min(100%,380px),1fr))}
.chart{display:flex;flex-direction:column}
.chart h3,.table h3{margin:0;font-size:14px;font-weight:600}
.chart p,.table p{margin:1px 0 8px;font-size:12.5px;color:var(--soft)}
svg{display:block}
.part+.part{margin-top:14px}
.plot,.spark{width:100%;overflow:visible}
.plot text{font-size:11px;fill:var(--soft);font-variant-numeric:tabular-nums}
.plot text.y{paint-order:stroke;stroke:var(--card);stroke-width:3px;stroke-linejoin:round}
.goal{stroke-width:1;stroke-dasharray:5 4}
line.goal.warn{stroke:var(--warn)}line.goal.bad{stroke:var(--bad)}
.grid{stroke:var(--rule)}.base{stroke:var(--base)}
.line{fill:none;stroke-width:1.75;stroke-linecap:round;stroke-linejoin:round;
vector-effect:non-scaling-stroke}
.area{stroke:none;fill-opacity:.28}
.band rect{fill:transparent}
.band line{stroke:var(--soft);stroke-width:1;vector-effect:non-scaling-stroke;opacity:0}
.band:hover line{opacity:.8}
.legend{list-style:none;margin:6px 0 0;padding:0;display:flex;flex-wrap:wrap;gap:2px 14px;
font-size:12.5px}
.legend li{display:flex;align-items:center;gap:5px;color:var(--soft);min-width:0;
overflow-wrap:anywhere}
.legend b{color:var(--ink);font-weight:550;font-variant-numeric:tabular-nums;white-space:nowrap}
.legend .key{flex:none}
.none{height:186px;display:grid;place-items:center;color:var(--soft);
font-size:13px;border-bottom:1px solid var(--base)}
.charts .table{grid-column:1/-1}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:13px;font-variant-numeric:tabular-nums}
th{font-weight:550;color:var(--soft);text-align:right;padding:4px 10px;white-space:nowrap}
td{padding:5px 10px;border-top:1px solid var(--rule);text-align:right;white-space:nowrap}
th.key,td.key{text-align:left;padding-left:0}
td .bar{display:inline-block;vertical-align:middle;margin-left:8px}
.bar .whole{fill:var(--rule)}
.heat .scroll{max-height:320px;overflow-y:auto}
.heat table{border-spacing:2px;border-collapse:separate}
.heat td,.heat tbody th{border:0;padding:7px 10px;border-radius:4px}
.heat td{text-align:center}.heat thead th{text-align:center}
.heat th.key{text-align:left;padding-left:0;font-weight:500;color:var(--ink)}
.heat thead th.key{color:var(--soft)}
.ramp{display:flex;align-items:center;gap:2px;margin-top:auto;padding-top:10px;font-size:11px;
color:var(--soft)}
.ramp i{width:14px;height:8px;border-radius:2px}
.ramp span:first-child{margin-right:4px}.ramp span:last-child{margin-left:4px}
footer{margin-top:28px}
@media (max-width:860px){.tiles{grid-template-columns:1fr 1fr}}
@media (max-width:600px){main{padding:16px 12px 28px}.tiles{gap:8px}
.card{padding:12px}.tile .main{font-size:23px}.tile dl{font-size:12px}}
@media print{body{background:#fff}.card{break-inside:avoid}}
"""


def _colours(values: tuple[str, ...]) -> str:
    return "".join(f"--s{number}:{value};" for number, value in enumerate(values))


def _heat(values: tuple[str, ...]) -> str:
    """The first colour in parts: with an opacity, a step of a heat map."""
    red, green, blue = bytes.fromhex(values[0][1:])
    return f"--heat:{red},{green},{blue};"


def _classes() -> str:
    return "".join(
        f".line.s{n}{{stroke:var(--s{n})}}.area.s{n},rect.s{n}{{fill:var(--s{n})}}"
        for n in range(len(_LIGHT))
    )


def _steps() -> str:
    """From the card's own colour to one on which the page's ink is still read well."""
    return "".join(
        f".h{n}{{background:rgba(var(--heat),{0.04 + 0.56 * n / NUM_STEPS:.2f})}}"
        f"rect.h{n}{{fill:rgba(var(--heat),{0.04 + 0.86 * n / NUM_STEPS:.2f})}}"
        for n in range(NUM_STEPS + 1)
    )


STYLE = (
    _SHEET.replace("LIGHT", _colours(_LIGHT) + _heat(_LIGHT)).replace(
        "DARK", _colours(_DARK) + _heat(_DARK)
    )
    + _classes()
    + _steps()
)


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


def page(about: About, times: Sequence[float], ask: Ask, contents: Contents = CHOICE) -> str:
    """The whole document."""
    refresh = (
        f'<meta http-equiv="refresh" content="{about.refresh_seconds}">'
        if about.refresh_seconds
        else ""
    )
    tiles = "".join(_tile(tile, times, ask) for tile in contents.headlines)
    sections = "".join(_section(section, times, ask) for section in contents.sections)
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


def _section(section: Row, times: Sequence[float], ask: Ask) -> str:
    inner = "".join(_panel(panel, times, ask) for panel in section.panels)
    return f'<h2>{escape(section.title)}</h2><div class="charts">{inner}</div>'


def _panel(panel: Panel, times: Sequence[float], ask: Ask) -> str:
    if panel.shape == "pairs":
        return heat(panel, ask(panel.queries[0].expr), times)
    if panel.shape == "buckets":
        return bucket_map(panel, ask(panel.queries[0].expr), times)
    if panel.shape == "table":
        return table(panel, times, ask)
    parts = []
    for own in dict.fromkeys(query.unit for query in panel.queries):  # an axis each
        part = msgspec.structs.replace(
            panel, queries=tuple(query for query in panel.queries if query.unit == own)
        )
        answers = [ask(query.expr) for query in part.queries]
        parts.append((own or panel.unit, named_lines(part, answers, times)))
    return chart(panel, parts, times)


MAX_ROWS = 200
_BAR = 56

Cells = tuple[str, ...]


def table(one: Panel, times: Sequence[float], ask: Callable[[str], Sequence[Line]]) -> str:
    """A card with a row for each cache or pod, in order of their names: newest values, bars for
    shares."""
    end = times[-1] if times else math.inf
    columns = [_values(column, one.down, end, ask) for column in one.queries]
    rows = sorted({row for values in columns for row in values if any(row)})
    shown = [i for i, values in enumerate(columns) if values]
    heads = [f'<th class="key" scope="col">{escape(key)}</th>' for key in one.down]
    heads += [f'<th scope="col">{escape(one.queries[i].legend)}</th>' for i in shown]
    body = "".join(
        f'<tr data-row="{escape(" ".join(filter(None, row)))}">'
        + "".join(f'<td class="key">{escape(part)}</td>' for part in row)
        + "".join(_cell(one.queries[i], one.unit, columns[i].get(row, math.nan)) for i in shown)
        + "</tr>"
        for row in rows[:MAX_ROWS]
    )
    more = f"<p>and {len(rows) - MAX_ROWS} more</p>" if len(rows) > MAX_ROWS else ""
    inner = (
        f'<div class="scroll"><table><thead><tr>{"".join(heads)}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>{more}"
        if rows
        else ""
    )
    return card(one, "table", inner)


def _values(
    column: Query, keys: tuple[str, ...], end: float, ask: Callable[[str], Sequence[Line]]
) -> dict[Cells, float]:
    return {
        tuple(line.labels.get(key, "") for key in keys): line.newest(end)
        for line in ask(column.expr)
    }


def _cell(column: Query, otherwise: Unit, value: float) -> str:
    unit = column.unit or otherwise
    drawn = _bar(value) if unit == "percentunit" and math.isfinite(value) else ""
    return (
        f'<td data-column="{escape(column.legend)}" data-value="{value!r}">'
        f"{text_of(value, unit)}{drawn}</td>"
    )


def _bar(share: float) -> str:
    filled = _BAR * min(1.0, max(0.0, share))
    return (
        f'<svg class="bar" width="{_BAR}" height="6" aria-hidden="true">'
        f'<rect class="whole" width="{_BAR}" height="6" rx="3"/>'
        f'<rect class="s0" width="{filled:.1f}" height="6" rx="3"/></svg>'
    )
