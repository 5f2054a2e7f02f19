"""The number of compute threads of a process, set for OpenMP before torch is imported.

Called by main/ first thing in a process, and for the environment of child processes. In a
container, the number of CPUs the kernel shows is the node's; a process that starts that many
threads under a quota of two CPUs spends its time being throttled. Never imports torch itself.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import MutableMapping
from pathlib import Path

_log = logging.getLogger(__name__)


def cpu_limit(root: Path = Path("/"), affinity: int | None = None) -> float:
    """CPUs this process may use: the least of its affinity and of every cgroup above it.

    Reads cgroup v2 (cpu.max) and v1 (cpu.cfs_quota_us) below `root`; whatever cannot be read does
    not limit.
    """
    limits = [float(affinity or len(os.sched_getaffinity(0)))]
    for kind, group in _groups(root):
        folder = root / "sys/fs/cgroup" / kind
        # In a cgroup namespace the path may lie outside the mount: then only the top is visible.
        for part in [group, *group.parents] if group.parts else [group]:
            quota = _quota_v2(folder / part) if kind == "" else _quota_v1(folder / part)
            if quota is not None:
                limits.append(quota)
    return min(limits)


def _groups(root: Path) -> list[tuple[str, Path]]:
    """(hierarchy folder, cgroup path) of this process; "" is the unified hierarchy (v2)."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return [("", Path())]
    found = []
    for line in lines:
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        relative = Path(*[p for p in Path(path).parts if p not in ("/", "..")])
        if number == "0" and controllers == "":
            found.append(("", relative))
        elif "cpu" in controllers.split(","):
            found += [(kind, relative) for kind in dict.fromkeys((controllers, "cpu"))]
    return found


def _quota_v2(folder: Path) -> float | None:
    words = _words(folder / "cpu.max")
    return _ratio(words[0], words[1]) if len(words) == 2 else None


def _quota_v1(folder: Path) -> float | None:
    quota, period = _words(folder / "cpu.cfs_quota_us"), _words(folder / "cpu.cfs_period_us")
    return _ratio(quota[0], period[0]) if quota and period else None


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _ratio(quota: str, period: str) -> float | None:
    """None for "max" and -1 (no limit), and for anything that is no number."""
    try:
        q, p = int(quota), int(period)
    except ValueError:
        return None
    return q / p if q > 0 and p > 0 else None


def num_threads(limit: float, processes: int = 1) -> int:
    """Threads for each of `processes` equal processes that share `limit` CPUs; at least 1.

    Rounded down: one thread too many stalls every parallel loop on a throttled core.
    """
    return max(1, int(limit / processes + 1e-6))


KERNEL_CACHE_ENTRIES = 128
"""Compiled products, one for each shape, that PyTorch and oneDNN each keep. Their own default of
1,024 takes 0.65 MB an entry: over 600 MB that no budget knows of, once prompts of all lengths have
come (e2e/results/measurements.md). Decode steps of up to 16 sequences find theirs in 128."""
_KERNEL_CACHES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")


def thread_environment(threads: int) -> dict[str, str]:
    """Environment of a process with `threads` compute threads.

    Waiting OpenMP threads sleep instead of spinning, however shortly: with neighbours on the cores
    a thread looks for work while the one it waits for is not running. Measured in
    docs/decisions/small-products-alone.md.
    """
    count = str(threads)
    return {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, "OMP_WAIT_POLICY": "passive"}


def configure(threads: int = 0, environ: MutableMapping[str, str] | None = None) -> int:
    """Sets this process's thread count before torch is imported; returns it. Bounds the caches of
    compiled kernels, too, unless the user has.

    `threads` 0: OMP_NUM_THREADS if the user has set it, else from the CPU limit. If torch is there
    already, its count is set, but waiting threads keep spinning.
    """
    environ = os.environ if environ is None else environ
    if threads <= 0:
        given = environ.get("OMP_NUM_THREADS", "")
        threads = int(given) if given.isdigit() and int(given) else 0
    count = threads or num_threads(cpu_limit())
    environ.update(thread_environment(count))
    for name in _KERNEL_CACHES:
        environ.setdefault(name, str(KERNEL_CACHE_ENTRIES))
    torch = sys.modules.get("torch")
    if torch is not None:
        _log.debug("torch was imported before its threads were configured")
        torch.set_num_threads(count)
    return count
