"""Heat maps: pairs, and buckets of a histogram over time. Pure.

Used by page.py. Pairs are a table of newest values, who sends down and who receives across, so that
it can be read without colours and scrolls on a phone. Buckets are drawn: time across, a row for
each bound, darker where more observations fell between two bounds. No style attribute is needed:
the steps of colour are classes of the page's sheet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import msgspec

from foveal_operator.cli.dashboard.promql.samples import Line
from foveal_operator.cli.dashboard.scales import clock_text, text_of, time_axis, value_axis
from foveal_operator.observability.panel import Panel

NUM_STEPS = 10
"""Colours above nothing; page.py has as many."""
MAX_SIDE = 40
"""Rows and columns at most; the rest is counted."""

LabelValues = tuple[str, ...]


def heat(panel: Panel, lines: Sequence[Line], times: Sequence[float]) -> str:
    """A card with the map; pairs without a number (nothing was sent) have none here."""
    end = times[-1] if times else math.inf
    cells = {(_key(line, panel.down), _key(line, panel.across)): line.newest(end) for line in lines}
    downs = sorted({down for down, _ in cells})
    acrosses = sorted({across for _, across in cells})
    if any(math.isfinite(value) for value in cells.values()):
        inner = _map(panel, cells, downs, acrosses)
    else:
        inner = '<div class="none">nothing in this time</div>'
    return (
        f'<section class="card chart heat" data-panel="{escape(panel.title)}">'
        f"<h3>{escape(panel.title)}</h3><p>{escape(panel.about)}</p>{inner}</section>"
    )


def _key(line: Line, labels: tuple[str, ...]) -> LabelValues:
    return tuple(line.labels.get(label, "") for label in labels)


def _name(key: LabelValues) -> str:
    """A process that is named as its pod is named once."""
    return escape(" ".join(dict.fromkeys(filter(None, key))))


def _map(
    panel: Panel,
    cells: dict[tuple[LabelValues, LabelValues], float],
    downs: list[LabelValues],
    acrosses: list[LabelValues],
) -> str:
    shown = acrosses[:MAX_SIDE]
    top = value_axis([v for v in cells.values() if math.isfinite(v)], panel.unit, panel.top).high
    heads = "".join(f'<th scope="col">{_name(key)}</th>' for key in shown)
    rows = "".join(
        f'<tr><th class="key" scope="row">{_name(down)}</th>'
        + "".join(_cell(panel, down, across, cells.get((down, across)), top) for across in shown)
        + "</tr>"
        for down in downs[:MAX_SIDE]
    )
    left_out = len(downs) * len(acrosses) - min(len(downs), MAX_SIDE) * len(shown)
    more = f"<p>and {left_out} more pairs</p>" if left_out else ""
    return (
        '<div class="scroll"><table><thead><tr>'
        f'<th class="key" scope="col">{escape(panel.down[0])} → {escape(panel.across[0])}</th>'
        f"{heads}</tr></thead><tbody>{rows}</tbody></table></div>{_scale(panel, top)}{more}"
    )


def _cell(
    panel: Panel, down: LabelValues, across: LabelValues, value: float | None, top: float
) -> str:
    name = f"{_name(down)} → {_name(across)}"
    if value is None or not math.isfinite(value):
        return f'<td data-pair="{name}" title="{name}: nothing">{text_of(math.nan)}</td>'
    return (
        f'<td class="h{step(value, top)}" data-pair="{name}" data-value="{value!r}" '
        f'title="{name}">{text_of(value, panel.unit)}</td>'
    )


def step(value: float, top: float) -> int:
    """The step of colour: 0 for nothing, NUM_STEPS for `top` and more."""
    share = min(1.0, max(0.0, value / top)) if top > 0 else 0.0
    return math.ceil(share * NUM_STEPS - 1e-9)


def _scale(panel: Panel, top: float) -> str:
    """From nothing to the top, as the cells are coloured."""
    swatches = "".join(f'<i class="h{number}"></i>' for number in range(NUM_STEPS + 1))
    return (
        f'<div class="ramp" aria-hidden="true"><span>{text_of(0.0, panel.unit)}</span>{swatches}'
        f"<span>{text_of(top, panel.unit)}</span></div>"
    )


MAX_COLUMNS = 90
"""Times across at most; of more, each second or third is drawn."""
_ROW, _LEFT, _BELOW = 15, 13, 22
"""Height of a row, share of the width for the bounds (percent), room for the times."""
_NOTHING = '<div class="none">nothing in this time</div>'

Counts = dict[tuple[int, float], float]
"""(row of the bound, time) to the observations between the bound before and this one."""


def bucket_map(panel: Panel, lines: Sequence[Line], times: Sequence[float]) -> str:
    """A card with the histogram over time, from counts up to each bound (`le`)."""
    shown = set(times[:: -math.ceil(len(times) / MAX_COLUMNS)]) if times else set()
    rows, counts = _between(lines, shown)
    inner = _drawn(panel, rows, counts, sorted(shown)) if counts else _NOTHING
    return (
        f'<section class="card chart buckets" data-panel="{escape(panel.title)}">'
        f"<h3>{escape(panel.title)}</h3><p>{escape(panel.about)}</p>{inner}</section>"
    )


def _between(lines: Sequence[Line], times: set[float]) -> tuple[list[tuple[float, float]], Counts]:
    """Rows as (lower, upper bound), from the first to the last with an observation."""
    of = {float(line.labels["le"]): dict(line.points) for line in lines if "le" in line.labels}
    uppers = sorted(of)
    counts: Counts = {}
    for moment in times:
        below = 0.0
        for row, upper in enumerate(uppers):
            value = of[upper].get(moment, math.nan)
            # Increases of single buckets are estimates, and may be slightly out of step.
            if value - below > 1e-9:
                counts[row, moment] = value - below
                below = value
    used = [row for row, _ in counts]
    first, last = min(used, default=0), max(used, default=-1)
    rows = list(zip([0.0, *uppers], uppers, strict=False))[first : last + 1]
    return rows, {(row - first, moment): value for (row, moment), value in counts.items()}


def _drawn(
    panel: Panel, rows: list[tuple[float, float]], counts: Counts, times: Sequence[float]
) -> str:
    height, width, top = _ROW * len(rows), 1000 / len(times), max(counts.values())
    places = {moment: number * width for number, moment in enumerate(times)}
    cells = []
    for (row, moment), value in sorted(counts.items()):
        lower, upper = (text_of(bound, panel.unit) for bound in rows[row])
        told = f"{clock_text(moment)[11:]}, {lower} to {upper}: {text_of(value)}"
        cells.append(
            f'<rect class="h{step(value, top)}" x="{places[moment]:.1f}" '
            f'y="{_ROW * (len(rows) - 1 - row)}" width="{width:.1f}" height="{_ROW}" '
            f'data-count="{value!r}"><title>{escape(told)}</title></rect>'
        )
    inside = (
        f'<svg x="{_LEFT}%" y="0" width="{100 - _LEFT}%" height="{height}" '
        f'viewBox="0 0 1000 {height}" preserveAspectRatio="none">{"".join(cells)}</svg>'
    )
    return (
        f'<svg class="plot" height="{height + _BELOW}" role="img" '
        f'aria-label="{escape(panel.title)}">{inside}{_labels(panel, rows, times, height)}</svg>'
        + _scale(msgspec.structs.replace(panel, unit="short"), top)
    )


def _labels(
    panel: Panel, rows: list[tuple[float, float]], times: Sequence[float], height: int
) -> str:
    every = math.ceil(len(rows) / 9)
    found = []
    for row, (_, upper) in enumerate(rows):
        if row % every == 0:
            text = "more" if math.isinf(upper) else text_of(upper, panel.unit)
            found.append(
                f'<text x="{_LEFT - 1}%" y="{_ROW * (len(rows) - row) - 4}" '
                f'text-anchor="end">{text}</text>'
            )
    across = time_axis(times)
    for moment, text in across.ticks:
        share = across.share(moment)
        if 0.05 <= share <= 0.95:
            found.append(
                f'<text x="{_LEFT + (100 - _LEFT) * share:.1f}%" y="{height + 16}" '
                f'text-anchor="middle">{text}</text>'
            )
    return "".join(found)
