"""Live series from the declarations in declared.py.

One Telemetry per process (or per test). Nothing here decides anything; an undeclared name or label
is a bug and fails at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from foveal_operator.telemetry.declared import OPERATOR_METRICS, OWN_LABEL, is_shared
from foveal_runtime.plan.metrics.metric import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Of no use to anybody here, and they double the number of series.
disable_created_metrics()  # type: ignore[no-untyped-call]


PIECE = 50
"""Resources whose series of one family are written at a time."""
Values = tuple[str, ...]
Series = Counter | Gauge | Histogram
_PER_RESOURCE = ("namespace", "name")


class _OfResources(Collector):
    """A family of gauges or counters of resources, as plain numbers.

    The library's own series weigh a kilobyte each, and it finds and drops one by looking at all;
    a resource has some sixty. A collector of the library's, read when somebody scrapes.
    """

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._suffix = "_total" if metric.kind == "counter" else ""
        self._rest_of = metric.labels[len(_PER_RESOURCE) :]
        self._known: dict[tuple[str, str], dict[Values, float]] = {}
        # By values of the other labels: those themselves, shared by all resources, and as text.
        self._rest: dict[Values, tuple[Values, str]] = {}

    def at(self, labels: dict[str, str]) -> tuple[dict[Values, float], Values]:
        """The resource's numbers, and which of them is meant."""
        assert len(labels) == len(self._metric.labels), f"{self._metric.name}: {labels}"
        rest = tuple(labels[label] for label in self._rest_of)
        if rest not in self._rest:
            pairs = zip(self._rest_of, rest, strict=True)
            text = "".join(f',{key}="{_escaped(value)}"' for key, value in pairs)
            self._rest[rest] = (rest, text)
        key = (labels["namespace"], labels["name"])
        return self._known.setdefault(key, {}), self._rest[rest][0]

    def forget(self, namespace: str, name: str, label: str, but: Container[str]) -> None:
        known = self._known.get((namespace, name), {})
        at = self._rest_of.index(label) if label else -1
        for rest in [r for r in known if at < 0 or r[at] not in but]:
            del known[rest]
        if not known:
            self._known.pop((namespace, name), None)

    def describe(self) -> Iterator[Family]:
        yield Family(self._metric.name, self._metric.help, self._metric.kind)

    def collect(self) -> Iterator[Family]:
        (family,) = self.describe()
        name = self._metric.name + self._suffix
        for (namespace, resource), known in self._known.items():
            of = {"namespace": namespace, "name": resource}
            for rest, value in known.items():
                labels = {**of, **dict(zip(self._rest_of, rest, strict=True))}
                family.samples.append(Sample(name, labels, value))
        yield family

    def text(self) -> Iterator[str]:
        """The same as Prometheus reads it, a resource at a time: resources may come and go between
        two. With the library's samples a thousand resources held everything up for a second."""
        metric, name = self._metric, self._metric.name + self._suffix
        yield f"# HELP {name} {metric.help}\n# TYPE {name} {metric.kind}\n"
        for (namespace, resource), known in list(self._known.items()):
            of = f'{name}{{namespace="{_escaped(namespace)}",name="{_escaped(resource)}"'
            yield "".join(
                f"{of}{self._rest[rest][1]}}} {value!r}\n" for rest, value in known.items()
            )


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


class Telemetry:
    """Counts, sets and observes by name. Series are kept at hand by their label values."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._of_process = CollectorRegistry(auto_describe=False)
        self._of_resources: dict[str, _OfResources] = {}
        self._metrics: dict[str, Series] = {}
        for metric in OPERATOR_METRICS:
            if metric.labels[:2] == _PER_RESOURCE and metric.kind != "histogram":
                found = self._of_resources[metric.name] = _OfResources(metric)
                self.registry.register(found)
            else:
                self._metrics[metric.name] = _make(metric, self.registry)
                self._of_process.register(self._metrics[metric.name])
        self._labels = {metric.name: tuple(metric.labels) for metric in OPERATOR_METRICS}
        self._series: dict[str, dict[Values, Series]] = {name: {} for name in self._labels}
        for metric in OPERATOR_METRICS:
            for labels in metric.first_series():
                self._find(metric.name, labels)

    def with_process(self) -> Telemetry:
        """Adds CPU, memory and file descriptors of this process."""
        for registry in (self.registry, self._of_process):
            ProcessCollector(registry=registry)
            PlatformCollector(registry=registry)
        return self

    def count(self, name: str, /, by: float = 1.0, **labels: str) -> None:
        if name in self._of_resources:
            known, rest = self._of_resources[name].at(labels)
            known[rest] = known.get(rest, 0.0) + by
            return
        found = self._find(name, labels)
        assert isinstance(found, Counter)
        found.inc(by)

    def set(self, name: str, value: float, /, **labels: str) -> None:
        if name in self._of_resources:
            known, rest = self._of_resources[name].at(labels)
            known[rest] = float(value)
            return
        found = self._find(name, labels)
        assert isinstance(found, Gauge)
        found.set(value)

    def observe(self, name: str, value: float, /, **labels: str) -> None:
        found = self._find(name, labels)
        assert isinstance(found, Histogram)
        found.observe(value)

    def forget(
        self, family: str, /, but: Container[str], *, label: str, namespace: str, name: str
    ) -> None:
        """Drops every series of a family that is about this resource, but those whose `label` has
        one of the values in `but`."""
        self._of_resources[family].forget(namespace, name, label, but)

    def forget_resource(self, namespace: str, name: str) -> None:
        """The resource is gone: so are its series."""
        for family in self._of_resources.values():
            family.forget(namespace, name, "", ())

    def _find(self, name: str, labels: dict[str, str]) -> Series:
        if not labels:
            return self._metrics[name]
        names = self._labels[name]
        assert len(labels) == len(names), f"{name} has the labels {names}"
        values = tuple(labels[label] for label in names)
        if is_shared(name):
            values += OWN_LABEL[1:]
        found = self._series[name].get(values)
        if found is None:
            found = self._series[name][values] = self._metrics[name].labels(*values)
        return found

    def value(self, name: str, /, **labels: str) -> float:
        """For tests and probes; 0.0 when there is no such series. `name` as exposed."""
        own = dict([OWN_LABEL]) if is_shared(name) else {}
        return self.registry.get_sample_value(name, {**labels, **own}) or 0.0

    def exposition(self, names: Sequence[str] = ()) -> Iterator[bytes]:
        """All series, or those of these names alone, in pieces between which others may work."""
        if names:
            yield generate_latest(self.registry.restricted_registry(names))
            return
        yield generate_latest(self._of_process)
        lines = (line for family in self._of_resources.values() for line in family.text())
        while piece := list(itertools.islice(lines, PIECE)):
            yield "".join(piece).encode()


def _make(metric: Metric, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
    labels = (*metric.labels, OWN_LABEL[0]) if is_shared(metric.name) else metric.labels
    if metric.kind == "counter":
        return Counter(metric.name, metric.help, labels, registry=registry)
    if metric.kind == "gauge":
        return Gauge(metric.name, metric.help, labels, registry=registry)
    return Histogram(metric.name, metric.help, labels, registry=registry, buckets=metric.buckets)
