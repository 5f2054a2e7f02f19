"""`foveal dashboard`: from sources of the test's own to the page; what is wrong is one line."""

from __future__ import annotations

import json
import math
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from foveal_operator.cli import main as cli
from foveal_operator.cli.dashboard import layout
from foveal_operator.cli.dashboard.chart import (
    MAX_COLUMNS,
    MAX_LINES,
    bucket_map,
    heat,
    legend,
    step,
)
from foveal_operator.cli.dashboard.command import run
from foveal_operator.cli.dashboard.page import POLICY, About, page
from foveal_operator.cli.dashboard.promql.evaluate import ask
from foveal_operator.cli.dashboard.promql.samples import Line
from foveal_operator.cli.dashboard.scales import NOTHING, text_of, time_axis, value_axis
from foveal_operator.cli.dashboard.sources import Direct, SourceError
from tests.support import metric_samples
from tests.support.dashboard_page import world_page, world_store
from tests.support.loopback_server import LoopbackHandler, LoopbackServer

Answer = Callable[[str], tuple[int, str]]


class Site(LoopbackServer):
    """`answer` says what a path is worth."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(_Page)
        self.answer = answer
        self.asked: list[tuple[str, str]] = []


class _Page(LoopbackHandler):
    server: Site

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers.get("Authorization", "")))
        status, text = self.server.answer(self.path)
        self.send(status, text.encode(), {"Location": text} if status == 302 else None)


@pytest.fixture
def site() -> Iterator[Callable[[Answer], Site]]:
    with ExitStack() as running:
        yield lambda answer: running.enter_context(Site(answer).running())


def moving_metrics() -> Answer:
    """The next scrape of the world at each request; its pods have no target labels of their own."""
    texts = iter([
        metric_samples.exposition([
            (name, tuple(p for p in labels if p[0] not in ("namespace", "resource", "pod")), value)
            for name, labels, value in samples
        ])
        for _, samples in list(metric_samples.scrapes(22))[10:]
    ])  # fmt: skip
    return lambda path: (200, next(texts))


class Parts(HTMLParser):
    """The page's elements: no duplicates of attributes, every element closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), (tag, attrs)
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta", "link"):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def values(self, attribute: str) -> dict[str, dict[str, str | None]]:
        return {str(a[attribute]): a for _, a in self.found if attribute in a}


def test_the_page_is_well_formed_and_asks_for_nothing() -> None:
    text = world_page()
    parts = Parts(text)
    assert "<qwen>" not in text
    assert "look <here>" not in text
    names = {tag for tag, _ in parts.found}
    assert not names & {"script", "img", "iframe", "object", "a", "form"}
    for _, attributes in parts.found:
        assert "style" not in attributes
        assert "src" not in attributes
        assert not any(name.startswith("on") for name in attributes)
    assert [a["href"] for tag, a in parts.found if tag == "link"] == ["data:,"]
    assert "url(" not in text
    assert "@import" not in text
    assert POLICY.startswith("default-src 'none'")
    assert len(text) < 1 << 20


def test_every_panel_and_table_of_the_layout_is_on_the_page_with_data() -> None:
    text = world_page()
    parts = Parts(text)
    panels = sorted(panel.title for section in layout.SECTIONS for panel in section.panels)
    assert sorted(a["data-panel"] for _, a in parts.found if "data-panel" in a) == panels
    assert parts.values("data-tile").keys() == {tile.title for tile in layout.HEADLINES}
    assert text.count("nothing in this time") == 0
    rows = set(parts.values("data-row"))
    assert {"ipc host", "kv device", "encoder", *metric_samples.PODS["engine"]} <= rows


def test_headlines_are_the_evaluators_numbers() -> None:
    parts = Parts(world_page())
    store = world_store()
    for tile in layout.HEADLINES:
        [line] = ask(store, layout.Chosen().fill(tile.main.expr), [store.times[-1]])
        shown = float(str(parts.values("data-tile")[tile.title]["data-value"]))
        assert shown == line.newest(store.times[-1])


@pytest.mark.parametrize(
    ("value", "unit", "wanted"),
    [
        (0, "short", "0"), (1234567, "short", "1.23M"), (999.9, "short", "1k"),
        (0.0004, "short", "<0.001"), (-3.5, "short", "−3.5"), (12, "reqps", "12/s"),
        (0.8412, "percentunit", "84.1 %"), (1, "percentunit", "100 %"),
        (2 << 30, "bytes", "2 GiB"), (1023, "bytes", "1 KiB"), (1536, "Bps", "1.5 KiB/s"),
        (0.0125, "s", "12.5 ms"), (90, "s", "1.5 min"), (0.00002, "s", "20 µs"),
        (float("nan"), "s", NOTHING), (float("inf"), "short", "∞"),
    ],
)  # fmt: skip
def test_numbers_are_written_with_three_figures(value: float, unit: Any, wanted: str) -> None:
    assert text_of(value, unit) == wanted


def test_axes_hold_all_values_and_have_round_ticks() -> None:
    for unit, values in (("short", [0.3, 7.2]), ("bytes", [5e6, 9e8]), ("s", [-0.2, 0.4]),
                         ("percentunit", [0.1]), ("reqps", [0.0]), ("bytes", [0.5])):  # fmt: skip
        axis = value_axis(values, unit)  # type: ignore[arg-type]
        assert axis.low <= min(values)
        assert axis.high >= max(values)
        assert 2 <= len(axis.ticks) <= 7, (unit, axis)
        assert any(value == 0 for value, _ in axis.ticks)
    assert value_axis([0.2], "percentunit", 1).high == 1
    # 100 and 200 seconds stood there as 1.67 and 3.33 minutes.
    assert [text for _, text in value_axis([200.0], "s").ticks] == ["0 s", "2 min", "4 min"]
    clock = time_axis([1_790_000_000.0, 1_790_003_600.0])
    assert [text for _, text in clock.ticks] == ["14:15", "14:30", "14:45", "15:00"]


def test_legends_leave_out_what_repeats_and_lines_are_bounded() -> None:
    labels = {"pod": "engine-0", "process": "engine-0", "cache": "kv"}
    assert legend("{{pod}} {{process}} {{cache}}", labels) == "engine-0 kv"
    assert legend("{{gone}} p50", {}) == "p50"
    lines = [Line({"pod": f"p{i}"}, ((0.0, i), (1.0, i))) for i in range(20)]
    text = page(About(subject="", source="", window_seconds=1), [0.0, 1.0], lambda expr: lines)
    assert f"and {20 - MAX_LINES} smaller ones" in text
    assert 'data-series="p19"' in text
    # Of many, those that are zero all the time told nothing and stood first.
    lines = [Line({"pod": f"p{i}"}, ((0.0, i > 17), (1.0, 0.0))) for i in range(20)]
    text = page(About(subject="", source="", window_seconds=1), [0.0, 1.0], lambda expr: lines)
    assert "and 18 smaller ones" in text
    assert 'data-series="p0"' not in text


def test_pairs_are_a_heat_map_whose_colours_are_the_values() -> None:
    """Each frontend process with each engine."""
    parts = Parts(world_page())
    source = layout.panel(layout.MIRROR, "Sent as hash only, by pair")
    store = world_store()
    real = {
        f"{line.labels['pod']} {line.labels['process']} → {line.labels['engine']}": line
        for line in ask(store, layout.Chosen().fill(source.queries[0].expr), [store.times[-1]])
    }
    shown = parts.values("data-pair")
    assert len(real) == 4
    assert shown.keys() == real.keys()
    top = value_axis([line.newest(store.times[-1]) for line in real.values()], "percentunit", 1)
    for name, line in real.items():
        value = float(str(shown[name]["data-value"]))
        assert value == line.newest(store.times[-1])
        assert shown[name]["class"] == f"h{step(value, top.high)}"


def test_a_heat_map_is_bounded_and_a_pair_without_values_has_no_colour() -> None:
    source = layout.panel(layout.MIRROR, "Sent as hash only, by pair")
    steps = [step(value, 1.0) for value in (0, 0.001, 0.1, 0.5, 0.91, 1, 7)]
    assert steps == [0, 1, 1, 5, 10, 10, 10]
    many = [
        Line({"pod": f"p{i:03}", "engine": f"e{j:03}"}, ((1.0, math.nan if i == j else 0.5),))
        for i in range(50) for j in range(3)
    ]  # fmt: skip
    text = heat(source, many, [1.0])
    assert f"and {10 * 3} more pairs" in text
    assert '<td data-pair="p000 → e000" title="p000 → e000: nothing">' in text
    assert "nothing in this time" in heat(source, [], [1.0])


def test_buckets_are_a_heat_map_of_what_fell_between_two_bounds() -> None:
    """Ten observations up to 0.1 s and 30 up to 0.5 s are 20 between the two."""
    source = layout.panel(layout.OVERVIEW, "First tokens by time")
    ups = {"0.05": (0.0, 0.0), "0.1": (10.0, 0.0), "0.5": (30.0, 5.0), "1.0": (30.0, 4.999),
           "+Inf": (30.0, 5.0)}  # fmt: skip
    lines = [Line({"le": le}, tuple(enumerate(counts))) for le, counts in ups.items()]
    text = bucket_map(source, lines, [0.0, 1.0])
    cells = [a for tag, a in Parts(text).found if tag == "rect"]
    assert sorted(float(str(a["data-count"])) for a in cells) == [5, 10, 20]
    assert re.findall(r"<title>([^<]+)</title>", text) == [
        "00:00:00 UTC, 50 ms to 100 ms: 10",
        "00:00:00 UTC, 100 ms to 500 ms: 20",
        "00:00:01 UTC, 100 ms to 500 ms: 5",
    ]
    by_count = {float(str(a["data-count"])): str(a["class"]) for a in cells}
    assert by_count == {10: "h5", 20: "h10", 5: "h3"}
    assert "nothing in this time" in bucket_map(source, [], [0.0, 1.0])
    many = [Line({"le": "+Inf"}, tuple((float(t), 1.0) for t in range(600)))]
    assert bucket_map(source, many, [float(t) for t in range(600)]).count("<rect") <= MAX_COLUMNS


def test_a_page_from_metrics(site: Any, tmp_path: Path, capsys: Any) -> None:
    source = site(moving_metrics())
    out = tmp_path / "page.html"
    arguments = cli.parser().parse_args([
        "dashboard", "--metrics", f"{source.url}/metrics", "--since", "6", "--out", str(out),
    ])  # fmt: skip
    assert run(arguments, sleep=lambda _: time.sleep(0.01)) == 0
    assert str(out) in capsys.readouterr().out
    assert len(source.asked) == 4
    parts = Parts(out.read_text())
    assert {"engine-0", "api-1"} <= set(parts.values("data-row"))
    assert float(str(parts.values("data-tile")["Requests/s"]["data-value"])) > 0
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]


def test_a_page_from_a_prometheus(site: Any, tmp_path: Path, capsys: Any) -> None:
    """The answers are the world's, moved to now."""
    store, asked = world_store(), set[str]()

    def answer(path: str) -> tuple[int, str]:
        words = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(path).query))
        asked.add(words["query"])
        start, end, step = (float(words[key]) for key in ("start", "end", "step"))
        times = [start + i * step for i in range(round((end - start) / step) + 1)]
        shift = times[-1] - store.times[-1]
        lines = ask(store, words["query"], [time - shift for time in times])
        result = [
            {"metric": line.labels, "values": [[t + shift, repr(v)] for t, v in line.points]}
            for line in lines
        ]
        data = {"resultType": "matrix", "result": result}
        return 200, json.dumps({"status": "success", "data": data})

    source = site(answer)
    out = tmp_path / "page.html"
    words = ["dashboard", "--prometheus", f"{source.url}/prefix/", "qwen", "-n", "models",
             "--since", "80s", "--window", "60s", "-o", str(out)]  # fmt: skip
    assert cli.main(words) == 0
    assert all(path.startswith("/prefix/api/v1/query_range?") for path, _ in source.asked)
    assert all("$" not in expr for expr in asked)
    assert any('namespace=~"models",resource=~"qwen",pod=~".*"' in expr for expr in asked)
    parts = Parts(out.read_text())
    assert set(metric_samples.PODS["frontend"]) <= set(parts.values("data-row"))
    [line] = ask(store, layout.Chosen().fill(layout.HEADLINES[0].main.expr), [store.times[-1]])
    shown = float(str(parts.values("data-tile")["Requests/s"]["data-value"]))
    assert shown == pytest.approx(line.newest(store.times[-1]))
    assert cli.main([*words[:3], "other", *words[4:]]) == 4
    assert 'resource=~"other"' in capsys.readouterr().err


def test_processes_that_two_addresses_show_count_once(site: Any) -> None:
    first = metric_samples.exposition(next(metric_samples.scrapes(1))[1])
    one, other = site(lambda path: (200, first)), site(lambda path: (200, first))
    direct = Direct([f"{one.url}/metrics", f"{other.url}/metrics"])
    direct.scrape(1.0)
    assert direct.targets == [f"{one.url}/metrics"]
    assert "left out" in direct.notes[0]


def test_a_target_that_goes_away_is_named_and_its_series_end(site: Any) -> None:
    texts = [metric_samples.exposition(samples) for _, samples in metric_samples.scrapes(3)]
    other = re.sub(r'process="([^"]*)"', r'process="\1-b"', texts[0])
    is_up = [True]
    one = site(lambda path: (200, texts[0]))
    gone = site(lambda path: (200, other) if is_up[0] else (503, "starting"))
    direct = Direct([f"{one.url}/metrics", f"{gone.url}/metrics"])
    direct.scrape(1.0)
    assert direct.notes == []
    is_up[0] = False
    direct.scrape(2.0)
    assert "503" in direct.notes[0]
    builds = direct.ask("count (foveal_build_info)")
    assert builds[0].newest(2.0) == 4


BAD: list[tuple[list[str], int, str]] = [
    (["--metrics", "127.0.0.1:8000"], 2, "is no address"),
    (["--metrics", "http://[::1"], 2, "is no address"),
    (["--metrics", "file:///etc/passwd"], 2, "is no address"),
    (["--prometheus", "http://user:word@127.0.0.1:9"], 2, "--token-file"),
    (["--prometheus", "http://127.0.0.1:99999"], 2, "is no address"),
    (["qwen"], 2, "--prometheus"),
    (["--board", "memory"], 2, "--prometheus"),
    (["-n", "models", "--metrics", "http://127.0.0.1:9/metrics"], 2, "--prometheus"),
    (["--interval", "0.1"], 2, "too short"),
    (["--since", "2h"], 2, "600 readings"),
    (["--since", "0"], 2, "longer"),
    (["--token-file", "/nonexistent/token"], 2, "cannot read the token"),
    (["--out", "/nonexistent/page.html"], 2, "cannot write"),
    (["--metrics", "http://127.0.0.1:9/metrics"], 4, "does not answer"),
    (["--prometheus", "http://127.0.0.1:9"], 4, "does not answer"),
]


@pytest.mark.parametrize(("words", "code", "told"), BAD, ids=lambda x: str(x)[:40])
def test_bad_input_is_one_line_and_a_code(
    words: list[str], code: int, told: str, capsys: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["dashboard", *words]) == code
    err = capsys.readouterr().err
    assert told in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


EMPTY = '{"status":"success","data":{"resultType":"matrix","result":[]}}'


@pytest.mark.parametrize(
    ("flag", "path", "answer", "told"),
    [
        ("--metrics", "/metrics", (200, "<html>"), "other than metrics"),
        ("--metrics", "/metrics", (200, "up 1\n"), "no metrics of Foveal"),
        ("--metrics", "/metrics", (401, "no"), "401"),
        ("--metrics", "/metrics", (302, "http://127.0.0.1:1/"), "moved to http://127.0.0.1:1/"),
        ("--prometheus", "", (200, "<html>"), "does not answer as a Prometheus"),
        ("--prometheus", "", (400, '{"status":"error","error":"too many"}'), "Bad Request: too"),
        ("--prometheus", "/prom/", (200, EMPTY), "has no series foveal_build_info"),
    ],
)  # fmt: skip
def test_a_source_that_is_none_is_told_so(
    site: Any, flag: str, path: str, answer: tuple[int, str], told: str, capsys: Any,
    tmp_path: Path, monkeypatch: Any,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    source = site(lambda asked: answer)
    (tmp_path / "token").write_text("secret\n")
    words = ["dashboard", flag, source.url + path, "--token-file", "token"]
    assert cli.main(words) == 4
    err = capsys.readouterr().err
    assert told in err
    assert err.count("\n") == 1
    assert "secret" not in err
    assert [auth for _, auth in source.asked] == ["Bearer secret"]


def test_watch_serves_the_page_on_the_loopback_address(site: Any, capsys: Any) -> None:
    source = site(moving_metrics())
    seen: dict[str, Any] = {}

    def look(seconds: float) -> None:
        """Plays the clock: at the second pause the page is up; then Ctrl-C."""
        seen["pauses"] = seen.get("pauses", 0) + 1
        time.sleep(0.01)
        if seen["pauses"] < 3:
            return
        url = re.findall(r"http://127\.0\.0\.1:\d+/", capsys.readouterr().out)[0]
        with urllib.request.urlopen(url, timeout=60) as answer:
            seen["page"], seen["head"] = answer.read().decode(), dict(answer.headers)
        for name, request in (
            ("other name", urllib.request.Request(url, headers={"Host": "evil.example"})),
            ("other path", urllib.request.Request(url + "etc/passwd")),
        ):
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(request, timeout=60)
            seen[name] = refused.value.code
            refused.value.close()
        raise KeyboardInterrupt

    arguments = cli.parser().parse_args([
        "dashboard", "--metrics", f"{source.url}/metrics", "--watch", "--port", "0",
    ])  # fmt: skip
    assert run(arguments, sleep=look) == 0
    assert seen["head"]["Content-Security-Policy"] == POLICY
    assert '<meta http-equiv="refresh" content="2">' in seen["page"]
    assert seen["other name"] == 421
    assert seen["other path"] == 404


def test_a_source_error_names_the_source() -> None:
    with pytest.raises(SourceError, match=r"127\.0\.0\.1:9/metrics does not answer"):
        Direct(["http://127.0.0.1:9/metrics"]).scrape(0.0)
