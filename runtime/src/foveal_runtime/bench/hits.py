"""Cache hits as a server's /metrics counts them.

vLLM and Foveal export the same names for the same things, so one table reads both; a server without
/metrics has no rows here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

HITS: dict[str, tuple[str, str, dict[str, str]]] = {
    "media": ("vllm:mm_cache_hits_total", "vllm:mm_cache_queries_total", {}),
    "prefix": ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total", {}),
    "processor": ("foveal_cache_hits_total", "foveal_cache_queries_total", {"cache": "processor"}),
    "ipc": ("foveal_cache_hits_total", "foveal_cache_queries_total", {"cache": "ipc"}),
    "encoder": ("foveal_cache_hits_total", "foveal_cache_queries_total", {"cache": "encoder"}),
}
"""By cache: the counter of hits, that of lookups, labels of both."""

Counts = dict[str, tuple[float, float]]


def read_hits(exposition: str) -> Counts:
    """(hits, lookups) by cache; caches that the text does not mention are left out."""
    sums: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    with contextlib.suppress(ValueError):  # a page that is something else
        for family in text_string_to_metric_families(exposition):
            for sample in family.samples:
                sums.setdefault(sample.name, []).append((sample.labels, sample.value))

    def total(name: str, labels: Mapping[str, str]) -> float:
        return sum(v for have, v in sums[name] if labels.items() <= have.items())

    found: Counts = {}
    for cache, (hits, lookups, labels) in HITS.items():
        if hits in sums and lookups in sums:
            found[cache] = (total(hits, labels), total(lookups, labels))
    return found


def hit_rates(before: Counts, after: Counts) -> dict[str, float]:
    """Hits per lookup between two readings; caches without lookups are left out."""
    rates = {}
    for cache, (hits, lookups) in after.items():
        old_hits, old_lookups = before.get(cache, (0.0, 0.0))
        if lookups > old_lookups:
            rates[cache] = (hits - old_hits) / (lookups - old_lookups)
    return rates
