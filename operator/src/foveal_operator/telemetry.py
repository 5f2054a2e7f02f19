"""Live series from the declarations of operator_metrics.py.

One Telemetry per process (or per test). Nothing here decides anything; an undeclared name or label
is a bug and fails at once.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from foveal_operator.operator_metrics import OPERATOR_METRICS
from foveal_runtime.plan.metric import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Of no use to anybody here, and they double the number of series.
disable_created_metrics()  # type: ignore[no-untyped-call]


class Telemetry:
    """Counts, sets and observes by name."""

    def __init__(self, metrics: Iterable[Metric] = OPERATOR_METRICS) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._metrics = {metric.name: _make(metric, self.registry) for metric in metrics}

    def with_process(self) -> Telemetry:
        """Adds CPU, memory and file descriptors of this process."""
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        return self

    def count(self, name: str, /, by: float = 1.0, **labels: str) -> None:
        found = self._metrics[name]
        assert isinstance(found, Counter)
        (found.labels(**labels) if labels else found).inc(by)

    def set(self, name: str, value: float, /, **labels: str) -> None:
        found = self._metrics[name]
        assert isinstance(found, Gauge)
        (found.labels(**labels) if labels else found).set(value)

    def observe(self, name: str, value: float, /, **labels: str) -> None:
        found = self._metrics[name]
        assert isinstance(found, Histogram)
        (found.labels(**labels) if labels else found).observe(value)

    def forget(self, name: str, /, **labels: str) -> None:
        """Drops every series of a family that has these labels."""
        self._metrics[name].remove_by_labels(labels)

    def value(self, name: str, /, **labels: str) -> float:
        """For tests and probes; 0.0 when there is no such series. `name` as exposed."""
        return self.registry.get_sample_value(name, labels) or 0.0

    def exposition(self) -> bytes:
        return generate_latest(self.registry)


def _make(metric: Metric, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
    if metric.kind == "counter":
        return Counter(metric.name, metric.help, metric.labels, registry=registry)
    if metric.kind == "gauge":
        return Gauge(metric.name, metric.help, metric.labels, registry=registry)
    return Histogram(
        metric.name, metric.help, metric.labels, registry=registry, buckets=metric.buckets
    )
