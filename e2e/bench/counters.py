"""What a server counts itself: cache hits from /metrics, and bytes on its internal sockets.

vLLM and Foveal export the same names for the same things, so one table reads both; a server
without /metrics has no rows here. Socket bytes are the kernel's (`ss`), so counting costs the
server nothing.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from typing import NamedTuple

import psutil
from prometheus_client.parser import text_string_to_metric_families

from e2e.bench.processes import role_of, tree

HITS = {
    "media": ("vllm:mm_cache_hits_total", "vllm:mm_cache_queries_total", {}),
    "prefix": ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total", {}),
    "processor": ("foveal_cache_hits_total", "foveal_cache_queries_total", {"cache": "processor"}),
    "ipc": ("foveal_cache_hits_total", "foveal_cache_queries_total", {"cache": "ipc"}),
    "encoder": ("foveal_cache_hits_total", "foveal_cache_queries_total", {"cache": "encoder"}),
}
"""By cache: the counter of hits, that of lookups, labels of both."""

Counts = dict[str, tuple[float, float]]
_BYTES = re.compile(r"bytes_(?:sent|received):(\d+)")
_SOCKET = re.compile(r"\S+:(\d+)\s+\S+:(\d+)")
_PID = re.compile(r"pid=(\d+)")


def read_hits(exposition: str) -> Counts:
    """(hits, lookups) by cache; caches that the text does not mention are left out."""
    sums: dict[str, list[tuple[Mapping[str, str], float]]] = {}
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


class Sockets(NamedTuple):
    """Bytes so far, both directions, by (port here, port there), of connections to engines."""

    num_bytes: dict[tuple[int, int], int]


def engine_sockets(pid: int) -> Sockets | None:
    """Of the TCP connections from frontends to engines below process `pid`; None: not known."""
    if not shutil.which("ss"):
        return None
    frontends, ports = set(), set()
    for process in tree(pid):
        role = role_of(process.cmdline())
        if role == "frontend":
            frontends.add(process.pid)
        elif role == "engine":
            listening = process.net_connections("tcp")
            ports |= {c.laddr.port for c in listening if c.status == psutil.CONN_LISTEN}
    command = ["ss", "-tinHOp", "state", "established"]
    text = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
    return Sockets(read_sockets(text, frontends, ports))


def read_sockets(text: str, pids: set[int], ports: set[int]) -> dict[tuple[int, int], int]:
    """The lines of `ss -tinHOp` of processes `pids` that are connected to one of `ports`."""
    found = {}
    for line in text.splitlines():
        socket = _SOCKET.search(line)
        owners = {int(pid) for pid in _PID.findall(line)}
        if socket and owners & pids and int(socket[2]) in ports:
            key = (int(socket[1]), int(socket[2]))
            found[key] = sum(map(int, _BYTES.findall(line)))
    return found


def bytes_between(before: Sockets | None, after: Sockets | None) -> int | None:
    """Bytes both ways on connections that were there all the time, heartbeats included."""
    if before is None or after is None:
        return None
    old = before.num_bytes
    return sum(num - old[key] for key, num in after.num_bytes.items() if key in old)
