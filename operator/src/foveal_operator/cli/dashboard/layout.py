"""Contents of the page: panels chosen from the dashboards. Pure.

Panels are named by board and title, so that the page and Grafana never differ in a query; a test
holds every name. Used by run.py and page.py.
"""

from __future__ import annotations

import re

import msgspec

from foveal_operator.observability.boards.caches import CACHES
from foveal_operator.observability.boards.encoder import ENCODER
from foveal_operator.observability.boards.mirror import MIRROR
from foveal_operator.observability.boards.overview import OVERVIEW
from foveal_operator.observability.panel import Board, Panel, Row, Unit
from foveal_operator.observability.promql import DASHBOARD as D


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One number: the newest value of a query's only series."""

    label: str
    expr: str
    unit: Unit = "short"
    warn: float | None = None
    bad: float | None = None


class Tile(msgspec.Struct, frozen=True):
    """A headline: one large number with its course, and smaller ones below it."""

    title: str
    about: str
    main: Figure
    more: tuple[Figure, ...] = ()


def panel(board: Board, title: str) -> Panel:
    found = [one for one in board.panels if one.title == title]
    assert len(found) == 1, f"{board.uid} has {len(found)} panels {title!r}"
    return found[0]


def _figure(board: Board, title: str, label: str = "", number: int = 0) -> Figure:
    return _newest(panel(board, title), label, number)


def _newest(source: Panel, label: str = "", number: int = 0) -> Figure:
    return Figure(label=label or source.queries[number].legend, unit=source.unit,
                  expr=source.queries[number].expr, warn=source.warn, bad=source.bad)  # fmt: skip


def _tile(title: str, board: Board, source: str, *more: Figure) -> Tile:
    return Tile(title, panel(board, source).about, _figure(board, source), more)


_TTFT = panel(OVERVIEW, "Time to first token")
_SENT = D.rate("foveal_mirror_value_bytes_sent")
_AVOIDED = D.rate("foveal_mirror_value_bytes_avoided")
_AVOIDED_SHARE = f"{_AVOIDED} / ({_AVOIDED} + {_SENT})"

HEADLINES = (
    _tile("Requests/s", OVERVIEW, "Sequences/s",
          Figure(label="in flight", expr=D.total("foveal_requests_inflight"))),
    Tile("Time to first token", _TTFT.about,
         _figure(OVERVIEW, "Time to first token", "p50", 0),
         (_figure(OVERVIEW, "Time to first token", "p95", 1),
          _figure(OVERVIEW, "Between tokens", "token gap p95", 1))),
    _tile("Tokens/s", OVERVIEW, "Tokens/s",
          Figure(label="prompt, from cache", unit="percentunit",
                 expr=D.ratio("vllm:prefix_cache_hits", "vllm:prefix_cache_queries"))),
    _tile("Errors", OVERVIEW, "Errors",
          Figure(label="rejected before admission", unit="reqps",
                 expr=D.rate("vllm:admission_rejections"))),
    Tile("Bytes avoided", "Value bytes not sent because the engine held them.",
         Figure(label="", unit="Bps", expr=_AVOIDED),
         (Figure(label="of value bytes", unit="percentunit", expr=_AVOIDED_SHARE),
          Figure(label="sent", unit="Bps", expr=_SENT))),
    _tile("Media hit ratio", OVERVIEW, "Media hit ratio",
          _figure(MIRROR, "Stale hints", "stale hints")),
    _tile("KV in use", OVERVIEW, "KV in use",
          Figure(label="requests waiting", expr=D.total("vllm:num_requests_waiting_by_reason"))),
    _tile("Frontends ready", OVERVIEW, "Frontends ready",
          _figure(OVERVIEW, "Engines ready", "engines ready")),
)  # fmt: skip

SECTIONS = (
    Row(title="Requests", panels=tuple(
        panel(OVERVIEW, title) for title in
        ("Finished", "Time to first token", "Between tokens", "First tokens by time",
         "Token gaps by time", "Time by stage", "Errors and refusals", "In flight"))),
    Row(title="What the caches save", panels=(
        panel(OVERVIEW, "Time to first token by media"),
        panel(OVERVIEW, "Hit ratio by cache"),
        panel(OVERVIEW, "Value bytes to engines"),
        panel(OVERVIEW, "Work saved"),
        panel(CACHES, "Used share of the budget"),
        panel(CACHES, "Evictions"))),
    Row(title="Caches", panels=(
        panel(CACHES, "Each cache"), panel(CACHES, "Would more memory help?"))),
    Row(title="Mirror health", panels=(
        panel(MIRROR, "Sent as hash only, by pair"),
        panel(MIRROR, "Values requested"),
        panel(MIRROR, "Wait for values"),
        panel(MIRROR, "Keys believed held"), panel(MIRROR, "Window in use"),
        panel(OVERVIEW, "Picks"))),
    Row(title="Encoder and media", panels=(
        panel(ENCODER, "Items encoded"), panel(ENCODER, "Embeddings"),
        panel(ENCODER, "Time in each stage"), panel(ENCODER, "Media workers"),
        panel(ENCODER, "Wait for the encoder"), panel(OVERVIEW, "Frontend processes"))),
    Row(title="Queue and KV memory", panels=(
        panel(OVERVIEW, "Requests"), panel(OVERVIEW, "Tokens"),
        panel(CACHES, "KV blocks"))),
    Row(title="Pods", panels=(panel(OVERVIEW, "Pods"),)),
)  # fmt: skip


class Contents(msgspec.Struct, frozen=True):
    """A page's headlines and sections."""

    headlines: tuple[Tile, ...] = HEADLINES
    sections: tuple[Row, ...] = SECTIONS


CHOICE = Contents()


def whole(board: Board) -> Contents:
    """All of a board: its single numbers as headlines, its rows as sections."""
    stats = (one for one in board.panels if one.shape == "stat")
    rows = ((row.title, tuple(p for p in row.panels if p.shape != "stat")) for row in board.rows)
    return Contents(
        tuple(Tile(one.title, one.about, _newest(one)) for one in stats),
        tuple(Row(title=title, panels=panels) for title, panels in rows if panels),
    )


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """The dashboards' variables, filled in. Empty = all."""

    namespace: str = ""
    resource: str = ""
    pod: str = ""
    window_seconds: int = 60

    def fill(self, expr: str) -> str:
        """The expression with its variables replaced."""
        for name in ("namespace", "resource", "pod"):
            value = getattr(self, name)
            # Inside a quoted pattern a backslash is written twice.
            pattern = re.escape(value).replace("\\", "\\\\") if value else ".*"
            expr = expr.replace(f"${name}", pattern)
        expr = expr.replace("$installation", ".*")
        return expr.replace("$__rate_interval", f"{self.window_seconds}s")
