"""The most that torch allocates while a piece of work runs. Resident memory, which `PeakMeter`
reads on a CPU, says what the C library's heap takes for it, too: half as much again where tests
that ran before have left it in pieces."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def most_allocated(work: Callable[[], object]) -> int:
    """Bytes beyond those that were allocated before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    now = most = 0
    for event in sorted(recorded.profiler.kineto_results.events(), key=lambda one: one.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most
