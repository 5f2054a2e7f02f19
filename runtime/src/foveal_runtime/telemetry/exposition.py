"""The two text formats of /metrics, and several processes' pages as one.

Used by telemetry/metrics.py, the engine's health server and the frontend's /metrics. Pure. A
scraper that accepts OpenMetrics gets it, with exemplars; all others get Prometheus' text format. In
a merged page each family has one HELP and TYPE and no series comes twice. Counters and histograms
that have the same labels in two processes are added, and the newer exemplar stays; of a gauge the
larger value stays (gauges that differ by process carry a `process` or `engine` label).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Metric as Family
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar, Sample

SampleKey = tuple[str, tuple[tuple[str, str], ...]]


class PageFormat(msgspec.Struct, frozen=True):
    """How a page is written and read. `families` raises ValueError for text of another format."""

    content_type: str
    render: Callable[[CollectorRegistry], bytes]
    families: Callable[[str], Iterable[Family]]


TEXT = PageFormat(
    "text/plain; version=0.0.4; charset=utf-8", generate_latest, text_string_to_metric_families
)
OPENMETRICS = PageFormat(
    openmetrics.CONTENT_TYPE_LATEST,
    # The library's other ways of escaping write `vllm:` with an underscore; no name needs any.
    partial(openmetrics.generate_latest, escaping=openmetrics.ALLOWUTF8),
    openmetrics_parser.text_string_to_metric_families,
)
_OPENMETRICS_TYPE = OPENMETRICS.content_type.partition(";")[0]


def accepted_format(accept: str) -> PageFormat:
    """The format for an Accept header: OpenMetrics only where it is named and nothing that is
    named as text/plain is liked better."""
    liked = {_OPENMETRICS_TYPE: 0.0, "text/plain": 0.0}
    for part in accept.split(","):
        media_type, *parameters = (word.strip().lower() for word in part.split(";"))
        if media_type in liked:
            liked[media_type] = max(liked[media_type], _quality(parameters))
    is_open = liked[_OPENMETRICS_TYPE] > 0 and liked[_OPENMETRICS_TYPE] >= liked["text/plain"]
    return OPENMETRICS if is_open else TEXT


def _quality(parameters: Iterable[str]) -> float:
    for parameter in parameters:
        if parameter.startswith("q="):
            try:
                return float(parameter[2:])
            except ValueError:
                return 0.0
    return 1.0


def format_of(content_type: str) -> PageFormat:
    """The format that an answer of this Content-Type has."""
    is_open = content_type.partition(";")[0].strip().lower() == _OPENMETRICS_TYPE
    return OPENMETRICS if is_open else TEXT


class _Families(Collector):
    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Family]:
        return self._families


def parse(text: str, form: PageFormat = TEXT) -> list[Family]:
    """Raises ValueError for text that is not an exposition."""
    return list(form.families(text))


def merge(expositions: Iterable[list[Family]], form: PageFormat = TEXT) -> bytes:
    """The union. Families whose type differs between processes keep the first one's series."""
    merged: dict[str, tuple[Family, dict[SampleKey, Sample]]] = {}
    for families in expositions:
        for family in families:
            known = merged.get(family.name)
            if known is None:
                known = merged[family.name] = (family, {})
            elif known[0].type != family.type:
                continue
            _add(known[1], family)
    out: list[Family] = []
    for family, samples in merged.values():
        union = Family(family.name, family.documentation, family.type)
        union.samples = list(samples.values())
        out.append(union)
    return render(out, form)


def render(families: Iterable[Family], form: PageFormat = TEXT) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(families))
    return form.render(registry)


def _add(samples: dict[SampleKey, Sample], family: Family) -> None:
    adds_up = family.type in ("counter", "histogram")
    for sample in family.samples:
        key = (sample.name, tuple(sorted(sample.labels.items())))
        known = samples.get(key)
        if known is None:
            samples[key] = sample
        elif adds_up:
            samples[key] = known._replace(
                value=known.value + sample.value,
                exemplar=_newer(known.exemplar, sample.exemplar),
            )
        else:
            samples[key] = known._replace(value=max(known.value, sample.value))


def _newer(one: Exemplar | None, other: Exemplar | None) -> Exemplar | None:
    if one is None or other is None:
        return one or other
    return max(one, other, key=lambda exemplar: float(exemplar.timestamp or 0.0))
