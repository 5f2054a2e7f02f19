"""Panels, rows and dashboards, as data. tests/support/grafana.py draws them."""

from __future__ import annotations

from typing import Literal

import msgspec

Unit = Literal["short", "bytes", "Bps", "s", "percentunit", "reqps", "ops", "celsius"]
Shape = Literal["timeseries", "stat", "pairs", "buckets", "table"]


class Query(msgspec.Struct, frozen=True):
    """`unit`: of this query alone, on an axis of its own to the right; None = the panel's."""

    expr: str
    legend: str = ""
    unit: Unit | None = None


class Panel(msgspec.Struct, frozen=True, kw_only=True):
    """One panel. `width` is of 24; Yellow begins at `warn`, red at `bad`; below
    them where bad < warn. A panel of pairs has one value for each combination of the labels `down`
    and `across`, and is drawn as a heat map. One of buckets shows those of a histogram over time.
    A table has a row for each combination of the labels `down` and a column for each query, with
    the newest value. `runbooks` are alerts whose pages the panel links."""

    title: str
    about: str
    queries: tuple[Query, ...]
    unit: Unit = "short"
    shape: Shape = "timeseries"
    width: int = 8
    height: int = 8
    stacked: bool = False
    top: float | None = None
    warn: float | None = None
    bad: float | None = None
    down: tuple[str, ...] = ()
    across: tuple[str, ...] = ()
    runbooks: tuple[str, ...] = ()


class Row(msgspec.Struct, frozen=True):
    title: str
    panels: tuple[Panel, ...]


class Board(msgspec.Struct, frozen=True, kw_only=True):
    """One dashboard; `variables` are those it has besides the data source."""

    uid: str
    title: str
    about: str
    rows: tuple[Row, ...]
    variables: tuple[str, ...] = ("namespace", "resource", "pod")

    @property
    def panels(self) -> list[Panel]:
        return [panel for row in self.rows for panel in row.panels]


def stat(title: str, about: str, expr: str, unit: Unit = "short", **more: object) -> Panel:
    """One number with its recent course, an eighth of the page wide."""
    values = {"width": 3, "height": 4, **more}
    return Panel(
        title=title, about=about, queries=(Query(expr),), unit=unit, shape="stat",
        **values,  # type: ignore[arg-type]
    )  # fmt: skip


def graph(
    title: str,
    about: str,
    *queries: tuple[str, str] | tuple[str, str, Unit],
    unit: Unit = "short",
    **more: object,
) -> Panel:
    """Lines over time; each query is (expression, legend) or (expression, legend, its own unit)."""
    drawn = tuple(Query(*query) for query in queries)
    return Panel(title=title, about=about, queries=drawn, unit=unit, **more)  # type: ignore[arg-type]


def pairs(
    title: str, about: str, query: tuple[str, str], unit: Unit = "short", **more: object
) -> Panel:
    """A heat map of one query; `down` and `across` are its labels."""
    return Panel(
        title=title, about=about, queries=(Query(*query),), unit=unit, shape="pairs",
        **more,  # type: ignore[arg-type]
    )  # fmt: skip


def buckets(title: str, about: str, expr: str, **more: object) -> Panel:
    """A heat map of a histogram of seconds over time: `expr` counts its buckets by `le`."""
    return Panel(
        title=title, about=about, queries=(Query(expr, "{{le}}"),), unit="s", shape="buckets",
        **more,  # type: ignore[arg-type]
    )  # fmt: skip


def table(
    title: str,
    about: str,
    down: tuple[str, ...],
    *columns: tuple[str, str] | tuple[str, str, Unit],
    **more: object,
) -> Panel:
    """Newest values; each column is (expression by the labels `down`, heading[, unit]). Shares are
    drawn with a bar."""
    return Panel(
        title=title, about=about, queries=tuple(Query(*column) for column in columns),
        shape="table", down=down, width=24, **more,  # type: ignore[arg-type]
    )  # fmt: skip
