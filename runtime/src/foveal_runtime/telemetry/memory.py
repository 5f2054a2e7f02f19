"""A container's memory against its limit, as the kernel accounts it: `foveal_budget_bytes`.

main/ registers `memory_source()` with the process's Metrics. Only reads files; outside a memory
cgroup with a limit (a laptop) it sets nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from foveal_runtime.telemetry.metrics import Metrics

_ROOT = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60


def memory_source(root: Path = _ROOT) -> Callable[[Metrics], None]:
    """For `Metrics.add_source`; `root` is where cgroups are mounted (v2, or v1's parent)."""

    def copy(metrics: Metrics) -> None:
        read = _read_v2(root) if (root / "memory.max").exists() else _read_v1(root / "memory")
        if read is None:
            return
        limit_bytes, used_bytes, cache_bytes = read
        metrics.set("foveal_budget_bytes", limit_bytes, part="pod", source="planned")
        metrics.set("foveal_budget_bytes", used_bytes, part="pod", source="measured")
        metrics.set("foveal_budget_bytes", cache_bytes, part="pageCache", source="measured")

    return copy


def _read_v2(folder: Path) -> tuple[int, int, int] | None:
    """(limit, anonymous + shared + kernel memory, page cache without shared memory)."""
    limit = _number(folder / "memory.max")
    if limit is None:
        return None
    stat = _stat(folder)
    shared = stat.get("shmem", 0)
    used = stat.get("anon", 0) + shared + stat.get("kernel", 0)
    return limit, used, max(0, stat.get("file", 0) - shared)


def _read_v1(folder: Path) -> tuple[int, int, int] | None:
    limit = _number(folder / "memory.limit_in_bytes")
    if limit is None:
        return None
    stat = _stat(folder)
    shared = stat.get("total_shmem", 0)
    kernel = _number(folder / "memory.kmem.usage_in_bytes") or 0
    used = stat.get("total_rss", 0) + shared + kernel
    return limit, used, max(0, stat.get("total_cache", 0) - shared)


def _number(file: Path) -> int | None:
    """None where there is no such file, no number in it, or no limit."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    found = int(text) if text.isdigit() else _NO_LIMIT
    return found if found < _NO_LIMIT else None


def _stat(folder: Path) -> dict[str, int]:
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.partition(" ") for line in lines)
    return {name: int(value) for name, _, value in pairs if value.isdigit()}
