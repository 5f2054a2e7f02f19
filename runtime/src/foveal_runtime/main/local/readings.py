"""From the processes' /metrics to the few figures that people watch. Pure.

Called by `foveal up` once a second. Families are named as in the runtime's registry; a family that
is missing reads as nothing, never as an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
from prometheus_client.parser import text_string_to_metric_families

CACHES = (("processor", "host"), ("ipc", "host"), ("encoder", "device"), ("encoder", "host"),
          ("kv", "device"))  # fmt: skip

_HELD = ("active", "cached")


class Readings:
    """The series of one process at one time."""

    def __init__(self, text: str) -> None:
        self._series: dict[str, list[tuple[Mapping[str, str], float]]] = {}
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    found = self._series.setdefault(sample.name, [])
                    found.append((sample.labels, float(sample.value)))
        except ValueError:
            # Cut off in the middle: what came before it is good.
            return

    def __bool__(self) -> bool:
        return bool(self._series)

    def total(self, name: str, **labels: str) -> float:
        """Sum of the series of a family that carry these labels; 0 when there are none."""
        return sum(
            value for found, value in self._series.get(name, ()) if labels.items() <= found.items()
        )

    def least(self, name: str) -> float:
        """The smallest of a family's series: what every process behind one port agrees on."""
        return min((value for _, value in self._series.get(name, ())), default=0.0)

    def has(self, name: str, **labels: str) -> bool:
        return any(labels.items() <= found.items() for found, _ in self._series.get(name, ()))


class CacheFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One cache over all processes. Queries and hits are items; tokens for kv."""

    name: str
    held_bytes: int
    capacity_bytes: int
    queries: int
    hits: int


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """What the whole deployment has done since it began."""

    requests_inflight: int = 0
    requests: int = 0
    tokens: int = 0
    bytes_sent: int = 0
    bytes_avoided: int = 0
    sessions: int = 0
    caches: tuple[CacheFigures, ...] = ()


def totals(readings: Iterable[Readings], kv_bytes: int) -> Totals:
    """Sums over all processes; each family has one exporter, so nothing counts twice.

    `kv_bytes`: the KV pools of all engines.
    """
    seen = [one for one in readings if one]

    def total(name: str, **labels: str) -> int:
        return int(sum(one.total(name, **labels) for one in seen))

    return Totals(
        requests_inflight=total("foveal_requests_inflight"),
        requests=total("vllm:request_success_total"),
        tokens=total("vllm:generation_tokens_total"),
        bytes_sent=total("foveal_mirror_value_bytes_sent_total"),
        bytes_avoided=total("foveal_mirror_value_bytes_avoided_total"),
        sessions=total("foveal_mirror_sessions"),
        caches=tuple(
            _cache(seen, name, tier, kv_bytes)
            for name, tier in CACHES
            if any(one.has("foveal_cache_capacity_bytes", cache=name, tier=tier) for one in seen)
            or (name == "kv" and any(one.has("foveal_kv_blocks") for one in seen))
        ),
    )


def _cache(seen: list[Readings], name: str, tier: str, kv_bytes: int) -> CacheFigures:
    def total(family: str) -> int:
        return int(sum(one.total(family, cache=name, tier=tier) for one in seen))

    held, capacity = total("foveal_cache_bytes"), total("foveal_cache_capacity_bytes")
    if name == "kv" and not capacity:
        # Engines count blocks; what all of them weigh, the documents say.
        cached = [one.total("foveal_kv_blocks", state=state) for one in seen for state in _HELD]
        blocks = sum(one.total("foveal_kv_blocks") for one in seen)
        held, capacity = int(kv_bytes * sum(cached) / blocks) if blocks else 0, kv_bytes
    queries = total("foveal_cache_queries_total")
    if tier == "host" and name == "encoder":
        # The host tier is asked when the device's has not got it.
        queries = int(
            sum(
                one.total("foveal_cache_queries_total", cache=name)
                - one.total("foveal_cache_hits_total", cache=name, tier="device")
                for one in seen
            )
        )
    return CacheFigures(
        name=name if tier == "device" or name != "encoder" else "encoder-host",
        held_bytes=held,
        capacity_bytes=capacity,
        queries=queries,
        hits=total("foveal_cache_hits_total"),
    )
