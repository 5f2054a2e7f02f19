"""Event-loop lag: the delay added to everything that waits in this process.

One task per frontend process, started by main/. A loop that is late does too much in one piece, or
has too many requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from foveal_runtime.telemetry.histogram import Histogram

INTERVAL_SECONDS = 0.25


async def watch(
    lags: Histogram,
    *,
    interval_seconds: float = INTERVAL_SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Observes, until cancelled, by how much each sleep was too long."""
    while True:
        began = clock()
        await asyncio.sleep(interval_seconds)
        lags.observe(max(0.0, clock() - began - interval_seconds))
