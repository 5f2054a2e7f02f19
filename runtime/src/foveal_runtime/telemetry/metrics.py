"""Live series from the declarations of plan.metrics: set, counted or collected at scrape time.

One Metrics per process, made by main/. Packages keep plain counters; a source registered here
copies them at scrape time, so hot paths pay nothing. A name, label or role that is not declared is
a bug and fails at once.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client import Metric as Family
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from foveal_runtime.plan.metrics import METRICS
from foveal_runtime.plan.metrics.gen_ai import PROVIDER
from foveal_runtime.plan.metrics.metric import TOKEN_BUCKETS, Metric, Role
from foveal_runtime.telemetry.exposition import TEXT, PageFormat, render
from foveal_runtime.telemetry.histogram import Histogram

LabelValues = tuple[str, ...]
_MAX_KEYS = 256
"""Of one family, kept so that they need not be put together for each value."""


class FamilyTotals(msgspec.Struct, array_like=True):
    """What a family has counted: counters, and histograms as (labels, counts, sum)."""

    values: list[tuple[LabelValues, float]]
    histograms: list[tuple[LabelValues, list[int], float]]


_read_totals = msgspec.json.Decoder(dict[str, FamilyTotals]).decode


class _Series:
    """All series of one family. `before`: what an earlier process in this one's place counted."""

    def __init__(self, metric: Metric, buckets: tuple[float, ...], fixed: Mapping[str, str]):
        self.metric = metric
        self.buckets = buckets
        self.fixed = fixed
        self.values: dict[LabelValues, float] = {}
        self.histograms: dict[LabelValues, Histogram] = {}
        self.exemplars: dict[LabelValues, dict[int, Exemplar]] = {}
        """The newest of each bucket, by its index."""
        self.before = FamilyTotals([], [])
        self._names = frozenset(metric.labels)
        self.required = self._names - set(fixed)
        self._keys: dict[tuple[tuple[str, str], ...], LabelValues] = {}

    def key(self, labels: Mapping[str, str]) -> LabelValues:
        given = tuple(labels.items())
        found = self._keys.get(given)
        if found is None:
            if len(self._keys) >= _MAX_KEYS:
                self._keys.clear()
            found = self._keys[given] = self._key(labels)
        return found

    def _key(self, labels: Mapping[str, str]) -> LabelValues:
        assert self._names >= labels.keys() >= self.required, (
            f"{self.metric.name} has labels {self.metric.labels}, not {sorted(labels)}"
        )
        return tuple(
            labels[name] if name in labels else self.fixed[name] for name in self.metric.labels
        )

    def histogram(self, key: LabelValues) -> Histogram:
        found = self.histograms.get(key)
        if found is None:
            found = self.histograms[key] = Histogram(self.buckets)
        return found

    @property
    def is_shared(self) -> bool:
        """Whether its series are added to those of other processes: they name none."""
        return self.metric.kind != "gauge" and "process" not in self.metric.labels

    def totals(self) -> FamilyTotals:
        values = dict(self.before.values)
        for key, value in self.values.items():
            values[key] = values.get(key, 0.0) + value
        counted = {key: (counts, total) for key, counts, total in self.before.histograms}
        for key, found in self.histograms.items():
            counts, total = counted.get(key, ([0] * len(found.counts), 0.0))
            added = [one + other for one, other in zip(counts, found.counts, strict=True)]
            counted[key] = (added, total + found.total)
        return FamilyTotals([*values.items()], [(key, *each) for key, each in counted.items()])

    def fits(self, totals: FamilyTotals) -> bool:
        """Whether they are of this family as it is declared."""
        num_labels, num_counts = len(self.metric.labels), len(self.buckets) + 1
        keys = [key for key, _ in totals.values] + [key for key, *_ in totals.histograms]
        return all(len(key) == num_labels for key in keys) and all(
            len(counts) == num_counts for _, counts, _ in totals.histograms
        )

    def family(self, totals: FamilyTotals | None = None) -> Family:
        """Of what it has counted, or of other `totals`."""
        metric, labels = self.metric, list(self.metric.labels)
        shown = self.totals() if totals is None else totals
        if metric.kind == "histogram":
            out = HistogramMetricFamily(metric.name, metric.help, labels=labels)
            for key, counts, total in shown.histograms:
                traced = self.exemplars.get(key, {}) if totals is None else {}
                counted = _cumulative(self.buckets, counts)
                buckets = [
                    (*pair, traced[index]) if index in traced else pair
                    for index, pair in enumerate(counted)
                ]
                out.add_metric(list(key), buckets, total)
            return out
        make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        flat = make(metric.name, metric.help, labels=labels)
        for key, value in shown.values:
            flat.add_metric(list(key), value)
        return flat


def _cumulative(buckets: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    out: list[tuple[str, float]] = []
    total = 0
    for bound, count in zip((*map(_bound, buckets), "+Inf"), counts, strict=True):
        total += count
        out.append((bound, float(total)))
    return out


def _bound(value: float) -> str:
    return str(float(value))


class _Named(Collector):
    """The client library's own families with a `process` label, so that they can be merged."""

    def __init__(self, inner: Collector, process: str) -> None:
        self._inner = inner
        self._process = process

    def collect(self) -> Iterable[Family]:
        for family in self._inner.collect():
            family.samples = [
                sample._replace(labels={**sample.labels, "process": self._process})
                for sample in family.samples
            ]
            yield family


Source = Callable[["Metrics"], None]
"""Called before each scrape; copies a room's counters with set() and set_histogram()."""


class Metrics(Collector):
    """The series of one process.

    Args:
        role: whose families may be used here.
        model_name, engine, process: constant labels, where a family has them.
        max_model_len: cuts the token histograms' buckets, as dashboards expect.
    """

    def __init__(
        self,
        role: Role,
        *,
        model_name: str,
        process: str,
        engine: str = "",
        max_model_len: int = 0,
    ) -> None:
        fixed = {
            "model_name": model_name,
            "process": process,
            "gen_ai_provider_name": PROVIDER,
            "gen_ai_request_model": model_name,
            "gen_ai_response_model": model_name,
        }
        if role == "engine":
            fixed["engine"] = engine
        self._series: dict[str, _Series] = {}
        for metric in METRICS:
            if role in metric.roles:
                mine = dict(fixed)
                if role == "frontend" and metric.name.startswith("vllm:"):
                    mine["engine"] = ""
                buckets = metric.buckets
                if buckets == TOKEN_BUCKETS and max_model_len:
                    buckets = tuple(size for size in buckets if size <= max_model_len)
                fixed_here = {name: mine[name] for name in metric.labels if name in mine}
                self._series[metric.name] = _Series(metric, buckets, fixed_here)
        self._sources: list[Source] = []
        self._kept: Path | None = None
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        for collector in (ProcessCollector(registry=None), PlatformCollector(registry=None)):
            self._registry.register(_Named(collector, process))
        self._begin_at_zero()

    def _begin_at_zero(self) -> None:
        """Counters and histograms whose labels are known exist from the start."""
        for series in self._series.values():
            for labels in series.metric.first_series(series.fixed):
                if series.metric.kind == "counter":
                    series.values[series.key(labels)] = 0.0
                else:
                    series.histogram(series.key(labels))

    def inc(self, name: str, amount: float = 1.0, **labels: str) -> None:
        series = self._of(name, "counter")
        key = series.key(labels)
        series.values[key] = series.values.get(key, 0.0) + amount

    def set(self, name: str, value: float, **labels: str) -> None:
        """A gauge's value, or a counter's as its owner counts it."""
        series = self._series[name]
        assert series.metric.kind != "histogram", f"{name} is a histogram"
        series.values[series.key(labels)] = float(value)

    def observe(self, name: str, value: float, *, trace_id: str = "", **labels: str) -> None:
        """`trace_id`: of the traced request it belongs to; the newest of each bucket is shown in
        OpenMetrics, for families that are declared as traced."""
        series = self._of(name, "histogram")
        key = series.key(labels)
        bucket = series.histogram(key).observe(value)
        if trace_id:
            assert series.metric.is_traced, f"{name} is not declared as traced"
            kept = series.exemplars.setdefault(key, {})
            kept[bucket] = Exemplar({"trace_id": trace_id}, value, round(time.time(), 3))

    def set_histogram(self, name: str, kept: Histogram, **labels: str) -> None:
        """A histogram that its owner keeps, with the declared buckets."""
        series = self._of(name, "histogram")
        assert kept.bounds == series.buckets, f"{name} has other buckets"
        found = series.histogram(series.key(labels))
        found.counts[:] = kept.counts
        found.total = kept.total

    def clear(self, name: str) -> None:
        """Forgets a family's series, before a source sets those that still exist."""
        self._series[name].values.clear()

    def add_source(self, source: Source) -> None:
        self._sources.append(source)

    def keep(self, file: Path) -> None:
        """Counts on from what an earlier process left in `file`, and leaves there what each page
        shows of the families whose series are added to other processes': their sums never fall."""
        for name, totals in self._read(file).items():
            self._series[name].before = totals
        self._kept = file

    def is_shared(self, name: str) -> bool:
        """Whether the series of a family are added to those of other processes."""
        return name in self._series and self._series[name].is_shared

    def families_in(self, file: Path) -> list[Family]:
        """Of the process that keeps `file`; none where it has shown nothing yet."""
        return [self._series[name].family(totals) for name, totals in self._read(file).items()]

    def _read(self, file: Path) -> dict[str, FamilyTotals]:
        try:
            found = _read_totals(file.read_bytes())
        except (OSError, msgspec.DecodeError):
            return {}
        series = self._series
        return {n: each for n, each in found.items() if n in series and series[n].fits(each)}

    def _write(self, file: Path) -> None:
        shared = {n: each.totals() for n, each in self._series.items() if each.is_shared}
        new = file.with_suffix(".new")
        with contextlib.suppress(OSError):  # a full disk costs no page
            new.write_bytes(msgspec.json.encode(shared))
            new.replace(file)

    def collect(self) -> Iterable[Family]:
        """For prometheus_client; families without series are left out."""
        for source in self._sources:
            source(self)
        if self._kept is not None:
            self._write(self._kept)
        for series in self._series.values():
            family = series.family()
            if family.samples:
                yield family

    def families(self) -> list[Family]:
        """As they are now, so that another thread can write them out, which takes most of the time
        of a page."""
        return list(self._registry.collect())

    def exposition(self, form: PageFormat = TEXT) -> bytes:
        return render(self.families(), form)

    def _of(self, name: str, kind: str) -> _Series:
        series = self._series[name]
        assert series.metric.kind == kind, f"{name} is a {series.metric.kind}"
        return series
