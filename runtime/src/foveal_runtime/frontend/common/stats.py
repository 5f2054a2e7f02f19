"""Plain counters of the media path and the engine client; telemetry/ turns them into metrics.

Written by input_processor, injection and engines.client; read at scrape time. No metric library.
`watch_loop` measures the event loop itself: the delay added to everything that waits in it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from foveal_runtime.plan.media import MODALITIES
from foveal_runtime.plan.metrics.metric import BYTE_BUCKETS, STAGE_BUCKETS
from foveal_runtime.telemetry.histogram import Histogram

STAGES = ("fetch", "hash", "decode", "process", "send", "queue")


class StageTimes(dict[str, Histogram]):
    """Seconds by stage."""

    def __init__(self) -> None:
        super().__init__((stage, Histogram(STAGE_BUCKETS)) for stage in STAGES)

    def observe(self, stage: str, seconds: float) -> None:
        self[stage].observe(seconds)

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.observe(stage, time.perf_counter() - begin)


@dataclass(slots=True)
class FrontendStats:
    """Counts since frontend start.

    Attributes:
        mm_queries, mm_hits: by modality index; one query per item and request (and per injected
            item); a hit is an item for which neither the processor ran nor value bytes were sent.
        value_source: where answered values came from: processor_cache, retained, recomputed, lost.
        url_text_hits: data URLs known by their text, not even base64-decoded.
        injected, injection_failures: items.
        resubmissions: attempts after the first, by reason.
        picks: sent attempts, by engine and the router's reason.
        value_bytes: sizes of processed items by modality index, once per item and request.
        loop_lags: seconds by which the event loop was late.
        splice_refused: modalities that failed the start-up check.
    """

    mm_queries: list[int] = field(default_factory=lambda: [0, 0, 0])
    mm_hits: list[int] = field(default_factory=lambda: [0, 0, 0])
    processed_items: list[int] = field(default_factory=lambda: [0, 0, 0])
    value_source: Counter[str] = field(default_factory=Counter)
    url_text_hits: int = 0
    injected: int = 0
    injection_failures: int = 0
    resubmissions: Counter[str] = field(default_factory=Counter)
    splice_refused: dict[str, str] = field(default_factory=dict)
    media_errors: Counter[str] = field(default_factory=Counter)
    stages: StageTimes = field(default_factory=StageTimes)
    picks: Counter[tuple[str, str]] = field(default_factory=Counter)
    value_bytes: list[Histogram] = field(
        default_factory=lambda: [Histogram(BYTE_BUCKETS) for _ in MODALITIES]
    )
    loop_lags: Histogram = field(default_factory=lambda: Histogram(STAGE_BUCKETS))


INTERVAL_SECONDS = 0.25


async def watch_loop(
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
