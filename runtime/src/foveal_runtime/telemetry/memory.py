"""This container's memory as the kernel that may kill it counts it: peak, use and limit.

Used by telemetry.last_words and by main/ as a metrics source. Reads the control group's files, of
version 2 or 1; a process outside any limit falls back to its own high-water mark.
"""

from __future__ import annotations

import resource
from pathlib import Path

from foveal_runtime.telemetry.metrics import Metrics

CGROUP = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60
"""Version 1 says "no limit" with a number near 2^63."""


class ContainerMemory:
    """Args: `cgroup`: where the container's own control group is mounted."""

    def __init__(self, cgroup: Path = CGROUP) -> None:
        self._cgroup = cgroup

    def peak_bytes(self) -> int:
        """The most there ever was: all processes, page cache and /dev/shm of the container. Without
        a control group, what this process alone had resident."""
        found = self._read("memory.peak")
        if not found and self._limit_v1():
            found = self._read("memory/memory.max_usage_in_bytes")
        return found or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def limit_bytes(self) -> int:
        """0 where there is none."""
        return self._read("memory.max") or self._limit_v1()

    def used_bytes(self) -> tuple[int, int]:
        """(anonymous + shared + kernel memory, page cache): the second is taken back when the first
        needs room. (0, 0) outside a limit."""
        if self._read("memory.max"):
            found = self._stat("memory.stat")
            anonymous, shared, cache = (found.get(key, 0) for key in ("anon", "shmem", "file"))
            kernel = found.get("kernel", 0)
        elif self._limit_v1():
            found = self._stat("memory/memory.stat")
            names = ("total_rss", "total_shmem", "total_cache")
            anonymous, shared, cache = (found.get(key, 0) for key in names)
            kernel = self._read("memory/memory.kmem.usage_in_bytes")
        else:
            return 0, 0
        return anonymous + shared + kernel, max(0, cache - shared)

    def collect(self, metrics: Metrics) -> None:
        """A telemetry source: `metrics.add_source(memory.collect)`."""
        metrics.set("foveal_memory_peak_bytes", self.peak_bytes())
        metrics.set("foveal_memory_limit_bytes", self.limit_bytes())
        used, cache = self.used_bytes()
        metrics.set("foveal_memory_used_bytes", used)
        metrics.set("foveal_memory_page_cache_bytes", cache)

    def _limit_v1(self) -> int:
        found = self._read("memory/memory.limit_in_bytes")
        return found if found < _NO_LIMIT else 0

    def _read(self, name: str) -> int:
        try:
            text = (self._cgroup / name).read_text().strip()
        except OSError:
            return 0
        return int(text) if text.isdigit() else 0

    def _stat(self, name: str) -> dict[str, int]:
        try:
            lines = (self._cgroup / name).read_text().splitlines()
        except OSError:
            return {}
        pairs = (line.partition(" ") for line in lines)
        return {key: int(value) for key, _, value in pairs if value.isdigit()}
