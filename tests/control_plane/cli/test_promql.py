"""PromQL's mathematics: by hand, and against a real Prometheus on every query of the page."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from foveal_operator.cli.dashboard import layout
from foveal_operator.cli.dashboard.promql.evaluate import (
    ask,
    deriv,
    divide,
    histogram_quantile,
    increase,
    rate,
)
from foveal_operator.cli.dashboard.promql.samples import (
    MAX_SERIES,
    Store,
    TooManySeriesError,
    labels_of,
)
from foveal_operator.cli.dashboard.promql.tree import ExpressionError, parse_expression
from foveal_operator.cli.dashboard.sources import Prometheus
from foveal_operator.observability.boards import BOARDS
from foveal_operator.observability.promql import DEVICE_METRICS
from foveal_runtime.plan.local import free_port
from tests.support import metric_samples

INF = math.inf


def line(*values: float, gap: float = 10.0, first: float = 5.0) -> list[tuple[float, float]]:
    return [(first + i * gap, value) for i, value in enumerate(values)]


def test_a_counters_increase_reaches_to_the_ends_of_the_window() -> None:
    steady = line(100, 110, 120, 130, 140, 150)  # 5 .. 55, of a window 0 .. 60
    assert increase(steady, 0, 60) == pytest.approx(60)
    assert rate(steady, 0, 60) == pytest.approx(1.0)


def test_a_counter_that_begins_anew_has_not_shrunk() -> None:
    # 100 -> 120, restart, 5 -> 25: grown by 20 + 5 + 20 in 40 s.
    assert increase(line(100, 120, 5, 25, 25), 5, 45) == pytest.approx(45)


def test_a_counter_is_not_extrapolated_below_zero_nor_far_beyond_its_samples() -> None:
    from_zero = line(0, 10, 20, first=5)  # was zero at 5: nothing before it
    assert increase(from_zero, 0, 25) == pytest.approx(20)
    few = line(100, 110, first=40)  # 40 and 50, in a window 0 .. 100: half a gap on both sides
    assert increase(few, 0, 100) == pytest.approx(20)


def test_one_sample_has_no_rate() -> None:
    assert rate(line(5), 0, 60) is None
    assert rate([], 0, 60) is None
    assert deriv(line(5), 0, 60) is None


def test_deriv_is_the_slope_of_least_squares() -> None:
    assert deriv(line(0, 20, 40, 60), 0, 60) == pytest.approx(2.0)
    assert deriv(line(10, 8, 12, 10), 0, 60) == pytest.approx(0.04)


@pytest.mark.parametrize(
    ("q", "buckets", "wanted"),
    [
        (0.5, [(1, 10), (2, 20), (INF, 20)], 1.0),
        (0.75, [(1, 10), (2, 20), (INF, 20)], 1.5),
        (0.25, [(1, 10), (2, 20), (INF, 20)], 0.5),
        (0.99, [(1, 10), (2, 20), (INF, 40)], 2.0),
        (0.5, [(INF, 4), (1, 1), (2, 3)], 1.5),
        (0.5, [(1, 5), (2, 4), (4, 10), (INF, 10)], 1.0),
        (-1, [(1, 1), (INF, 1)], -INF),
        (2, [(1, 1), (INF, 1)], INF),
        (0.0, [(0.0, 3), (1, 6), (INF, 6)], 0.0),
    ],
)
def test_quantiles(q: float, buckets: list[tuple[float, float]], wanted: float) -> None:
    assert histogram_quantile(q, buckets) == pytest.approx(wanted)


def test_a_quantile_of_nothing_is_no_number() -> None:
    assert math.isnan(histogram_quantile(0.5, [(1, 0), (INF, 0)]))
    assert math.isnan(histogram_quantile(0.5, [(INF, 5)]))
    assert math.isnan(histogram_quantile(0.5, [(1, 5), (2, 6)]))


def test_division_by_zero_is_not_an_error() -> None:
    assert divide(1, 0) == INF
    assert divide(-1, 0) == -INF
    assert math.isnan(divide(0, 0))


def small_store() -> Store:
    store = Store()
    a, b = labels_of({"pod": "a", "kind": "x"}), labels_of({"pod": "b", "kind": "x"})
    for i in range(4):
        store.add(10.0 * i, [("m", a, i), ("m", b, 10.0 * i), ("n", b, 2.0)])
    return store


@pytest.mark.parametrize(
    ("expr", "wanted"),
    [
        ("sum (m)", {"": 33.0}),
        ("sum by (pod) (m)", {"a": 3.0, "b": 30.0}),
        ("max by (kind) (m)", {"x": 30.0}),
        ("count (m)", {"": 2.0}),
        ("avg (m) - 2 * 3", {"": 10.5}),
        ('m{pod!="a"}', {"xb": 30.0}),
        ('m{pod=~"a|c"}', {"xa": 3.0}),
        ('m{pod!~"a.*"}', {"xb": 30.0}),
        ("sum by (pod) (m) / sum by (pod) (n)", {"b": 15.0}),
        ("m > 5", {"xb": 30.0}),
        ("sum (missing) or vector(7)", {"": 7.0}),
        ("sum (m) or vector(7)", {"": 33.0}),
        ("time() - sum (n)", {"": 28.0}),
        ("sum (increase(m[40s]))", {"": pytest.approx(33.0)}),
        ("sum by (pod) (m) and on (pod) n > 1", {"b": 30.0}),
        ("m and on (pod) n > 2 or n", {"xb": 2.0}),
        ('sum by (to) (label_replace(m, "to", "$1", "pod", "(a)|c"))', {"a": 3.0, "": 30.0}),
    ],
)
def test_expressions(expr: str, wanted: dict[str, float]) -> None:
    found = ask(small_store(), expr, [30.0])
    assert {"".join(one.labels.values()): one.newest(30.0) for one in found} == wanted


@pytest.mark.parametrize(
    "expr",
    ["topk(3, m)", "m[5m]", "rate(m)", "sum by (pod", "m{pod}", "m offset 5m", "vector(m)", ")",
     'm{pod="a"', "m and n", 'label_replace(m, "pod", "$1", "kind", "(.+)")',
     'label_replace(m, "to", "$2", "pod", "(a)(b)")', "1 > 2", "histogram_quantile(0.5, 3)", "$x"],
)  # fmt: skip
def test_what_is_not_known_is_an_error_and_no_wrong_figure(expr: str) -> None:
    with pytest.raises((ExpressionError, ValueError)):
        ask(small_store(), expr, [30.0])


def test_a_series_that_is_no_longer_shown_is_gone_at_once() -> None:
    store = small_store()
    store.add(40.0, [("n", labels_of({"pod": "b"}), 1.0)])
    assert ask(store, "sum (m)", [40.0]) == []
    store.add(50.0, [])
    assert ask(store, "sum (n)", [50.0]) == []


def test_the_store_is_bounded() -> None:
    store = Store(max_scrapes=3)
    for i in range(10):
        store.add(float(i), [("m", labels_of({"pod": str(i // 5)}), 1.0)])
    assert list(store.times) == [7.0, 8.0, 9.0]
    assert [list(series.times) for series in store.family("m")] == [[7.0, 8.0, 9.0]]
    many = [("m", labels_of({"pod": f"p{i}"}), 1.0) for i in range(MAX_SERIES + 1)]
    with pytest.raises(TooManySeriesError):
        Store().add(1.0, many)


def test_every_query_of_every_resource_dashboard_is_understood() -> None:
    chosen = layout.Chosen()
    for board in BOARDS:
        for panel in board.panels:
            for query in panel.queries:
                parse_expression(chosen.fill(query.expr))


def scrapes() -> Iterator[tuple[float, list[metric_samples.Sample]]]:
    """Those of metric_samples with what an exporter tells of devices, in both of its ways."""
    own = {"namespace": "models", "pod": "qwen-engine-0"}
    exported = {f"exported_{key}": value for key, value in own.items()}
    for when, samples in metric_samples.scrapes(60):
        for metric in DEVICE_METRICS:
            for gpu, labels in enumerate((own, {"namespace": "gpus", "pod": "dcgm-a"} | exported)):
                labelled = labels_of({"gpu": str(gpu), **labels})
                samples.append((metric.name, labelled, when % 100 + gpu))
        yield when, samples


WORLD_TIMES = [metric_samples.START - 3 + i * 10.0 for i in range(12, 60)]


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real one that holds metric_samples's samples; its address."""
    if not shutil.which("prometheus") or not shutil.which("promtool"):
        pytest.skip("prometheus and promtool are not installed (Debian's package: prometheus)")
    folder = tmp_path_factory.mktemp("prometheus")
    with (folder / "samples").open("w") as file:
        for when, samples in scrapes():
            file.write(metric_samples.exposition(samples, when))
        file.write("# EOF\n")
    subprocess.run(
        ["promtool", "tsdb", "create-blocks-from", "openmetrics", "samples", "data"],
        cwd=folder, check=True, capture_output=True, timeout=100,
    )  # fmt: skip
    (folder / "prometheus.yml").write_text("global: {}\n")
    address = f"127.0.0.1:{free_port()}"
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data",
             "--storage.tsdb.retention.time=100y", f"--web.listen-address={address}"],
            cwd=folder, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        _wait_ready(f"http://{address}/-/ready", process, folder / "log")
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(timeout=60)


def _wait_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 90
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.1)  # between two looks, not for anything
    raise AssertionError(log.read_text())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_answers_are_a_real_prometheus_answers(prometheus: str) -> None:
    """Every query of the page and of every resource dashboard, at 48 times."""
    store = Store()
    for when, samples in scrapes():
        store.add(when, samples)
    chosen = layout.Chosen(namespace="models", resource="qwen", window_seconds=60)
    figures = (one for tile in layout.HEADLINES for one in (tile.main, *tile.more))
    exprs = dict.fromkeys(one.expr for one in figures)
    chosen_panels = (p for section in layout.SECTIONS for p in section.panels)
    panels = (*chosen_panels, *(p for b in BOARDS[:-2] for p in b.panels))
    exprs |= dict.fromkeys(q.expr for p in panels for q in p.queries)
    source = Prometheus(prometheus, now=WORLD_TIMES[-1], since_seconds=470, num_steps=47)
    assert source.times == WORLD_TIMES
    num_values = 0
    for expr in exprs:
        filled = chosen.fill(expr)
        theirs = {json.dumps(one.labels, sort_keys=True): one.points for one in source.ask(filled)}
        ours = {
            json.dumps(one.labels, sort_keys=True): one.points
            for one in ask(store, filled, WORLD_TIMES)
        }
        assert ours.keys() == theirs.keys(), filled
        assert theirs or "DCGM" not in expr, filled
        for labels, points in theirs.items():
            assert [t for t, _ in ours[labels]] == [t for t, _ in points], (filled, labels)
            for (_, mine), (_, real) in zip(ours[labels], points, strict=True):
                assert mine == pytest.approx(real, rel=1e-6, abs=1e-9, nan_ok=True), filled
                num_values += 1
    assert num_values > 10_000
