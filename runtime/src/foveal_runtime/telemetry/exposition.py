"""Several processes' /metrics as one: one HELP and TYPE per family, no series twice.

Used by the frontend's /metrics endpoint. Pure: text in, text out. Counters and histograms that
have the same labels in two processes are added; of a gauge the larger value stays (gauges that
differ by process carry a `process` or `engine` label).
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Metric as Family
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

SampleKey = tuple[str, tuple[tuple[str, str], ...]]


class _Families(Collector):
    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Family]:
        return self._families


def parse(text: str) -> list[Family]:
    """Raises ValueError for text that is not an exposition."""
    return list(text_string_to_metric_families(text))


def merge(expositions: Iterable[list[Family]]) -> bytes:
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
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(out))
    return generate_latest(registry)


def _add(samples: dict[SampleKey, Sample], family: Family) -> None:
    adds_up = family.type in ("counter", "histogram")
    for sample in family.samples:
        key = (sample.name, tuple(sorted(sample.labels.items())))
        known = samples.get(key)
        if known is None:
            samples[key] = sample
        elif adds_up:
            samples[key] = known._replace(value=known.value + sample.value)
        else:
            samples[key] = known._replace(value=max(known.value, sample.value))
