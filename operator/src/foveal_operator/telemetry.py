"""Live series from the declarations of operator_metrics.py.

One Telemetry per process (or per test). Nothing here decides anything; an undeclared name or label
is a bug and fails at once.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

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


Values = tuple[str, ...]
Series = Counter | Gauge | Histogram


class Telemetry:
    """Counts, sets and observes by name.

    Series are kept at hand by their label values, and those of one resource (labels `namespace`
    and `name`) by that: the library finds and drops series by looking at all of them.
    """

    def __init__(self, metrics: Iterable[Metric] = OPERATOR_METRICS) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        metrics = tuple(metrics)
        self._metrics = {metric.name: _make(metric, self.registry) for metric in metrics}
        self._labels = {metric.name: tuple(metric.labels) for metric in metrics}
        self._series: dict[str, dict[Values, Series]] = {metric.name: {} for metric in metrics}
        self._of_resource: dict[tuple[str, str, str], set[Values]] = {}
        for metric in metrics:
            for labels in metric.first_series():
                self._find(metric.name, labels)

    def with_process(self) -> Telemetry:
        """Adds CPU, memory and file descriptors of this process."""
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        return self

    def count(self, name: str, /, by: float = 1.0, **labels: str) -> None:
        found = self._find(name, labels)
        assert isinstance(found, Counter)
        found.inc(by)

    def set(self, name: str, value: float, /, **labels: str) -> None:
        found = self._find(name, labels)
        assert isinstance(found, Gauge)
        found.set(value)

    def observe(self, name: str, value: float, /, **labels: str) -> None:
        found = self._find(name, labels)
        assert isinstance(found, Histogram)
        found.observe(value)

    def forget(
        self,
        family: str,
        /,
        but: Container[str] = (),
        *,
        label: str = "",
        namespace: str,
        name: str,
    ) -> None:
        """Drops every series of a family that is about this resource, but those whose `label` has
        one of the values in `but`."""
        about = (family, namespace, name)
        at = self._labels[family].index(label) if label else -1
        known = self._of_resource.get(about, set())
        for values in [v for v in known if at < 0 or v[at] not in but]:
            known.discard(values)
            del self._series[family][values]
            self._metrics[family].remove(*values)
        if not known:
            self._of_resource.pop(about, None)

    def _find(self, name: str, labels: dict[str, str]) -> Series:
        if not labels:
            return self._metrics[name]
        names = self._labels[name]
        assert len(labels) == len(names), f"{name} has the labels {names}"
        values = tuple(labels[label] for label in names)
        found = self._series[name].get(values)
        if found is None:
            found = self._series[name][values] = self._metrics[name].labels(*values)
            if "namespace" in labels and "name" in labels:
                about = (name, labels["namespace"], labels["name"])
                self._of_resource.setdefault(about, set()).add(values)
        return found

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
