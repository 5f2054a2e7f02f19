"""Tables of the page: one row for each cache or pod, newest values, bars for shares. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from foveal_operator.cli.dashboard.promql.samples import Line
from foveal_operator.cli.dashboard.scales import text_of
from foveal_operator.observability.panel import Panel, Query, Unit

MAX_ROWS = 200
_BAR = 56

Row = tuple[str, ...]


def table(one: Panel, times: Sequence[float], ask: Callable[[str], Sequence[Line]]) -> str:
    """A card with the table; rows in order of their names."""
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
        else '<div class="none">nothing in this time</div>'
    )
    return (
        f'<section class="card table" data-panel="{escape(one.title)}"><h3>{escape(one.title)}'
        f"</h3><p>{escape(one.about)}</p>{inner}</section>"
    )


def _values(
    column: Query, keys: tuple[str, ...], end: float, ask: Callable[[str], Sequence[Line]]
) -> dict[Row, float]:
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
