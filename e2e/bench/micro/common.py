"""What the micro benches share: best-of timing, and the limits of this machine to compare with."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

from blake3 import blake3

_LARGE_BYTES = 64 * 1024**2
"""Beyond the caches of the machines that this runs on."""


def best_seconds(work: Callable[[], object], budget_seconds: float = 0.2) -> float:
    """The shortest of many runs of `work` (at least 5): what it costs when nobody disturbs."""
    work()
    best, runs, end = float("inf"), 0, time.perf_counter() + budget_seconds
    while runs < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
        runs += 1
    return best


def best_cpu_seconds(work: Callable[[], object], num_runs: int = 3) -> float:
    """The least CPU time of all threads: what counts while neighbours take the cores away."""
    work()
    best = float("inf")
    for _ in range(num_runs):
        start = time.process_time()
        work()
        best = min(best, time.process_time() - start)
    return best


@functools.cache
def copy_rate() -> float:
    """Bytes a second of one thread copying (memcpy of a block larger than the caches)."""
    source, target = bytearray(_LARGE_BYTES), bytearray(_LARGE_BYTES)

    def copy() -> None:
        memoryview(target)[:] = source

    return _LARGE_BYTES / best_seconds(copy)


@functools.cache
def hash_rate(num_bytes: int) -> float:
    """Bytes a second of BLAKE3 alone on inputs of this size."""
    data = bytes(num_bytes)
    return num_bytes / best_seconds(lambda: blake3(data).digest())


@functools.cache
def call_seconds() -> float:
    """An empty Python call: what nothing written in Python goes below."""

    def nothing() -> None:
        return None

    def thousand() -> None:
        for _ in range(1000):
            nothing()

    return best_seconds(thousand) / 1000


def show(title: str, seconds: float, limit: str, limit_seconds: float) -> None:
    """One line: what it costs, what the limit would be, how many times the limit that is."""
    times = seconds / limit_seconds if limit_seconds else float("inf")
    print(f"{title:<58}{seconds * 1e6:>10.1f} us {times:>8.1f} x {limit}", flush=True)
