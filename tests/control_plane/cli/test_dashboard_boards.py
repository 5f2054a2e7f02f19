"""`foveal dashboard --board`: each of the Grafana dashboards whole."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

import pytest

from foveal_operator.cli import main as cli
from foveal_operator.cli.dashboard import layout
from foveal_operator.cli.dashboard.command import BOARD_NAMES
from foveal_operator.cli.dashboard.page import About, page
from foveal_operator.cli.dashboard.promql.evaluate import ask
from foveal_operator.cli.dashboard.promql.samples import Line, Store, labels_of
from foveal_operator.cli.dashboard.sources import Prometheus
from foveal_operator.observability.boards import BOARDS
from foveal_operator.observability.panel import Board

TIMES = (0.0, 15.0, 30.0)
ABOUT = About(subject="", source="", window_seconds=60)


def shown(board: Board, *values: float) -> tuple[str, set[str]]:
    """The page where every query is answered with one line, and the queries."""
    asked = set[str]()
    keys = [key for one in board.panels for key in one.down + one.across]

    def answer(expr: str) -> list[Line]:
        asked.add(expr)
        labels = {**dict.fromkeys(keys, "x"), "le": "1"}
        return [Line(labels, tuple(zip(TIMES, values, strict=True)))]

    return page(ABOUT, TIMES, answer, layout.whole(board)), asked


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_a_board_is_shown_whole(board: Board) -> None:
    """Single numbers as headlines, rows as sections; whatever functions the queries take."""
    text, asked = shown(board, 0.93, 0.94, 0.96)
    titles = re.findall(r' data-(?:panel|tile)="([^"]*)"', text)
    assert sorted(map(unescape, titles)) == sorted(panel.title for panel in board.panels)
    assert asked == {query.expr for panel in board.panels for query in panel.queries}
    assert [unescape(one) for one in re.findall(r"<h2>([^<]*)</h2>", text)] == [
        row.title for row in board.rows if any(panel.shape != "stat" for panel in row.panels)
    ]


def test_goals_are_lines_where_they_lie_within_the_axis() -> None:
    [memory] = [board for board in BOARDS if board.uid == "foveal-memory"]
    goals = [panel for panel in memory.panels if panel.warn and panel.shape == "timeseries"]
    assert len(goals) == 2
    for level in ("warn", "bad"):
        lines = re.findall(rf'<line class="goal {level}"', shown(memory, 0.93, 0.94, 0.96)[0])
        assert len(lines) == len(goals)
    # An axis that ends at 1 has its goals in any case, the other one only where values come near.
    assert shown(memory, 0.01, 0.01, 0.01)[0].count('<line class="goal') == 2


@pytest.mark.parametrize(
    ("requests", "failed", "share"),
    [(0, 0, 0), (3, 0, 0), (4, 1, 0.25), (None, None, 0)],
    ids=["idle", "no failure yet", "one of four", "no request ever"],
)
def test_errors_are_a_number_on_an_idle_server(
    requests: int | None, failed: int | None, share: float
) -> None:
    families = {
        ("http_requests_total", labels_of({"handler": "/v1/models", "status": "2xx"})): requests,
        ("foveal_request_errors_total", labels_of({"code": "engine_error"})): failed,
    }
    store = Store()
    for scrape in range(4):
        store.add(15.0 * scrape, [
            (name, labels, 7.0 + number * scrape)
            for (name, labels), number in families.items() if number is not None
        ])  # fmt: skip
    [tile] = [panel for panel in layout.HEADLINES if panel.title == "Errors"]
    [found] = ask(store, layout.Chosen(window_seconds=60).fill(tile.main.expr), [45.0])
    assert found.newest(45.0) == pytest.approx(share)


def test_boards_are_chosen_by_their_names() -> None:
    assert [f"foveal-{name}" for name in BOARD_NAMES] == [board.uid for board in BOARDS]
    queries = [query for board in BOARDS for panel in board.panels for query in panel.queries]
    filled = [layout.Chosen(pod="a.b").fill(query.expr) for query in queries]
    assert not [expr for expr in filled if re.search(r"\$[a-zA-Z_]", expr)]


@pytest.mark.parametrize(
    ("board", "has_operator", "code"),
    [("operator", True, 0), ("rollout", True, 0), ("operator", False, 4), ("mirror", True, 4)],
)
def test_a_board_of_the_operator_needs_no_pod_that_serves(
    board: str, has_operator: bool, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was refused while no resource had a pod, which is when somebody looks at it."""
    asked: list[str] = []

    def ask(source: Prometheus, expr: str) -> list[Line]:
        asked.append(expr)
        is_told = has_operator and expr == "foveal_operator_watch_is_up"
        return [Line({}, ((source.times[-1], 1.0),))] if is_told else []

    monkeypatch.setattr(Prometheus, "ask", ask)
    words = ["--prometheus", "http://127.0.0.1:9", "--board", board, "--out", f"{tmp_path}/a.html"]
    assert cli.main(["dashboard", *words]) == code
    assert any("foveal_build_info" in expr for expr in asked)
