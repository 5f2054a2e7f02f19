"""One panel as a card: lines, stacked areas or buckets as inline SVG, pairs as a table. Pure.

Used by page.py. The plot is stretched to its card's width while text and strokes keep their size,
so that one drawing serves a phone and a wall. No script and no style attribute: the page's policy
allows neither. Colours are classes, page.py gives them for light and dark.

Heat maps: pairs are a table of newest values, who sends down and who receives across, which can be
read without colours and scrolls on a phone. Buckets of a histogram are drawn: time across, a row
for each bound, darker where more observations fell between two bounds.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from html import escape

import msgspec

from foveal_operator.cli.dashboard.promql.samples import Line
from foveal_operator.cli.dashboard.scales import Axis, clock_text, text_of, time_axis, value_axis
from foveal_operator.observability.panel import Panel, Unit

MAX_LINES = 8
"""As many colours as can be told apart; the rest is counted."""
_WIDTH, _HEIGHT = 1000, 150
_TOP, _BELOW = 14, 22
_NOTHING = '<div class="none">nothing in this time</div>'


class Named(msgspec.Struct, frozen=True):
    """A line with its legend. `points` have no gaps other than those of the answer."""

    name: str
    points: tuple[tuple[float, float], ...]

    last: float
    """The value at the page's last time; NaN when the line has ended before."""


def named_lines(
    panel: Panel, answers: Sequence[Sequence[Line]], times: Sequence[float]
) -> list[Named]:
    """The lines of all the panel's queries, named by its legends."""
    end = times[-1] if times else math.inf
    return [
        Named(legend(query.legend, line.labels) or panel.title, line.points, line.newest(end))
        for query, lines in zip(panel.queries, answers, strict=True)
        for line in lines
    ]


def legend(template: str, labels: dict[str, str]) -> str:
    """`{{cache}} {{tier}}` filled in; a word that repeats the one before it is left out."""
    filled = re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), template)
    words: list[str] = []
    for word in filled.split():
        if not words or words[-1] != word:
            words.append(word)
    return " ".join(words)


def chart(
    panel: Panel, parts: Sequence[tuple[Unit, Sequence[Named]]], times: Sequence[float]
) -> str:
    """A card: title, what it says, and for each unit a plot with its legend."""
    return card(panel, "chart", "".join(_part(panel, unit, lines, times) for unit, lines in parts))


def card(panel: Panel, kind: str, inner: str) -> str:
    """What a panel looks like from outside, whatever it draws; `inner` is "" for no data."""
    return (
        f'<section class="card {kind}" data-panel="{escape(panel.title)}">'
        f"<h3>{escape(panel.title)}</h3><p>{escape(panel.about)}</p>"
        f"{inner or _NOTHING}</section>"
    )


def _part(panel: Panel, unit: Unit, lines: Sequence[Named], times: Sequence[float]) -> str:
    """Lines of one unit; nothing where none has a value."""
    drawn, left_out = _chosen(lines)
    if not any(math.isfinite(value) for line in drawn for _, value in line.points):
        return ""
    stacked = _stacked(drawn, times) if panel.stacked else [line.points for line in drawn]
    values = [value for points in stacked for _, value in points]
    across = time_axis(times)
    # A bound is of the panel's own unit.
    up = value_axis(values, unit, panel.top if unit == panel.unit else None)
    plot = _plot(panel, unit, drawn, stacked, across, up)
    return f'<div class="part">{plot}{_legend(drawn, unit, left_out)}</div>'


def _chosen(lines: Sequence[Named]) -> tuple[list[Named], int]:
    """Those with the largest values, in their own order, and how many are left out. Of many, those
    that are zero all the time come last."""
    found = [line for line in lines if line.points]

    def weight(line: Named) -> float:
        return max((abs(v) for _, v in line.points if math.isfinite(v)), default=-1.0)

    if len(found) <= MAX_LINES:
        return found, 0
    kept = sorted(range(len(found)), key=lambda i: -weight(found[i]))[:MAX_LINES]
    kept = [i for i in kept if weight(found[i]) > 0] or kept
    return [found[i] for i in sorted(kept)], len(found) - len(kept)


def _stacked(
    lines: Sequence[Named], times: Sequence[float]
) -> list[tuple[tuple[float, float], ...]]:
    """Each line on top of those before it; a line that is not there counts nothing."""
    below = dict.fromkeys(times, 0.0)
    found = []
    for line in lines:
        for time, value in line.points:
            below[time] = below.get(time, 0.0) + (value if math.isfinite(value) else 0.0)
        found.append(tuple((time, below[time]) for time, _ in line.points))
    return found


def _plot(
    panel: Panel,
    unit: Unit,
    lines: Sequence[Named],
    stacked: Sequence[tuple[tuple[float, float], ...]],
    across: Axis,
    up: Axis,
) -> str:
    said = "; ".join(f"{line.name} {text_of(line.last, unit)}" for line in lines)
    parts = [
        f'<svg class="plot" height="{_TOP + _HEIGHT + _BELOW}" role="img" '
        f'aria-label="{escape(panel.title)}: {escape(said)}">'
    ]
    for value, _ in up.ticks:
        y = _y(up, value) + _TOP
        kind = "base" if value == 0 else "grid"
        parts.append(f'<line class="{kind}" x1="0" x2="100%" y1="{y:g}" y2="{y:g}"/>')
    parts.append(
        f'<svg x="0" y="{_TOP}" width="100%" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none">'
    )
    for level in ("warn", "bad") if unit == panel.unit else ():
        goal = getattr(panel, level)
        if goal is not None and up.low <= goal <= up.high:
            y = _y(up, goal)
            parts.append(f'<line class="goal {level}" x1="0" x2="{_WIDTH}" y1="{y:g}" y2="{y:g}"/>')
    below: tuple[tuple[float, float], ...] = ()
    drawn = []
    for number, points in enumerate(stacked):
        area = _area(points, below, across, up, number) if panel.stacked else ""
        drawn.append(area + _line(points, across, up, number))
        below = points
    # What lies on top of a stack is drawn first: a part of no height hides nothing.
    parts += reversed(drawn) if panel.stacked else drawn
    parts += [*_bands(unit, lines, across), "</svg>"]
    parts += _texts(across, up)
    return "".join(parts) + "</svg>"


def _texts(across: Axis, up: Axis) -> list[str]:
    found = []
    for value, text in up.ticks[1:]:
        found.append(f'<text class="y" x="0" y="{_y(up, value) + _TOP - 4:g}">{text}</text>')
    shares = [(100 * across.share(moment), text) for moment, text in across.ticks]
    inside = [(share, text) for share, text in shares if 7 <= share <= 93]
    for share, text in inside if len(inside) > 1 else shares:
        anchor = "start" if share < 7 else "end" if share > 93 else "middle"
        found.append(
            f'<text class="x" x="{share:.1f}%" y="{_TOP + _HEIGHT + 16}" '
            f'text-anchor="{anchor}">{text}</text>'
        )
    return found


def _x(across: Axis, moment: float) -> float:
    return round(_WIDTH * across.share(moment), 1)


def _y(up: Axis, value: float) -> float:
    return round(_HEIGHT * (1 - up.share(value)), 1)


def _runs(points: Sequence[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    """Parts without gaps: where a value is no number or samples are missing, the line ends."""
    gaps = sorted(b[0] - a[0] for a, b in itertools.pairwise(points))
    usual = gaps[len(gaps) // 2] if gaps else 0.0
    runs: list[list[tuple[float, float]]] = [[]]
    before = points[0][0] if points else 0.0
    for moment, value in points:
        if not math.isfinite(value) or moment - before > 2.5 * usual:
            runs.append([])
        before = moment
        if math.isfinite(value):
            runs[-1].append((moment, value))
    return [run for run in runs if run]


def _line(points: Sequence[tuple[float, float]], across: Axis, up: Axis, number: int) -> str:
    path = ""
    for run in _runs(points):
        spots = [f"{_x(across, moment):g},{_y(up, value):g}" for moment, value in run]
        # A single value is drawn too: a stroke without length, with round ends.
        path += "M" + " ".join(spots if len(spots) > 1 else [*spots, *spots])
    return f'<path class="line s{number}" d="{path}"/>'


def _area(
    points: Sequence[tuple[float, float]],
    below: Sequence[tuple[float, float]],
    across: Axis,
    up: Axis,
    number: int,
) -> str:
    floor = dict(below)
    edge = [f"{_x(across, moment):g},{_y(up, value):g}" for moment, value in points]
    edge += [
        f"{_x(across, moment):g},{_y(up, floor.get(moment, 0.0)):g}"
        for moment, _ in reversed(points)
    ]
    return f'<path class="area s{number}" d="M{" ".join(edge)}Z"/>'


def _bands(unit: Unit, lines: Sequence[Named], across: Axis) -> list[str]:
    """A strip for each time that lights up under the pointer and tells all values."""
    values: dict[float, list[str]] = {}
    for line in lines:
        for moment, value in line.points:
            values.setdefault(moment, []).append(f"{line.name}: {text_of(value, unit)}")
    moments = sorted(values)
    found = []
    for index, moment in enumerate(moments):
        left = _x(across, moments[index - 1]) if index else _x(across, moment)
        right = _x(across, moments[index + 1]) if index + 1 < len(moments) else _x(across, moment)
        middle = _x(across, moment)
        start, end = (left + middle) / 2, (middle + right) / 2
        clock = clock_text(moment)[11:]
        told = escape("\n".join([clock, *values[moment]]))
        found.append(
            f'<g class="band"><title>{told}</title><rect x="{start:.1f}" y="0" '
            f'width="{max(end - start, 0.5):.1f}" height="{_HEIGHT}"/>'
            f'<line x1="{middle:g}" x2="{middle:g}" y1="0" y2="{_HEIGHT}"/></g>'
        )
    return found


def _legend(lines: Sequence[Named], unit: Unit, left_out: int) -> str:
    items = [
        f'<li data-series="{escape(line.name)}" data-last="{line.last!r}">'
        f'<svg class="key" width="12" height="12"><rect class="s{number}" y="4" width="12" '
        f'height="4" rx="2"/></svg><span>{escape(line.name)}</span> '
        f"<b>{text_of(line.last, unit)}</b></li>"
        for number, line in enumerate(lines)
    ]
    if left_out:
        items.append(f'<li class="more">and {left_out} smaller ones</li>')
    return f'<ul class="legend">{"".join(items)}</ul>'


def sparkline(points: Sequence[tuple[float, float]], times: Sequence[float]) -> str:
    """The course of a headline, without axes."""
    finite = [value for _, value in points if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    across, up = time_axis(times), Axis(min(0.0, *finite), max(finite) or 1.0, ())
    path = ""
    for run in _runs(points):
        spots = [f"{_x(across, t):g},{4 + (_HEIGHT - 8) * (1 - up.share(v)):.1f}" for t, v in run]
        path += "M" + " ".join(spots if len(spots) > 1 else [*spots, *spots])
    return (
        f'<svg class="spark" height="34" aria-hidden="true" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'preserveAspectRatio="none"><path class="line s0" d="{path}"/></svg>'
    )


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
    has_data = any(math.isfinite(value) for value in cells.values())
    return card(panel, "chart heat", _map(panel, cells, downs, acrosses) if has_data else "")


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

Counts = dict[tuple[int, float], float]
"""(row of the bound, time) to the observations between the bound before and this one."""


def bucket_map(panel: Panel, lines: Sequence[Line], times: Sequence[float]) -> str:
    """A card with the histogram over time, from counts up to each bound (`le`)."""
    shown = set(times[:: -math.ceil(len(times) / MAX_COLUMNS)]) if times else set()
    rows, counts = _between(lines, shown)
    inner = _drawn(panel, rows, counts, sorted(shown)) if counts else ""
    return card(panel, "chart buckets", inner)


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
