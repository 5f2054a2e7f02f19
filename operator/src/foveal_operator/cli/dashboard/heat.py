"""A panel of pairs as a heat map: who sends down, who receives across, the newest value in each
cell, and its colour. Pure.

Used by page.py. A table, so that it can be read without colours, scrolls on a phone, and needs no
style attribute: the steps of colour are classes of page.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from foveal_operator.cli.dashboard.promql.samples import Line
from foveal_operator.cli.dashboard.scales import text_of, value_axis
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
