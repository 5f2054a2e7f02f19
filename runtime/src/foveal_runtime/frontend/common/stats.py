"""Plain counters of the media path and the engine client; telemetry/ turns them into metrics.

Written by input_processor, injection and engines.client; read at scrape time. No metric library.
`watch_loop` measures the event loop itself: the delay added to everything that waits in it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from foveal_runtime.plan.media import MODALITIES
from foveal_runtime.plan.metrics.registry import BYTE_BUCKETS, STAGE_BUCKETS
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
    value_source: dict[str, int] = field(default_factory=dict)
    url_text_hits: int = 0
    injected: int = 0
    injection_failures: int = 0
    resubmissions: dict[str, int] = field(default_factory=dict)
    splice_refused: dict[str, str] = field(default_factory=dict)
    media_errors: dict[str, int] = field(default_factory=dict)
    stages: StageTimes = field(default_factory=StageTimes)
    picks: dict[tuple[str, str], int] = field(default_factory=dict)
    value_bytes: list[Histogram] = field(
        default_factory=lambda: [Histogram(BYTE_BUCKETS) for _ in MODALITIES]
    )
    loop_lags: Histogram = field(default_factory=lambda: Histogram(STAGE_BUCKETS))

    def count_source(self, source: str) -> None:
        self.value_source[source] = self.value_source.get(source, 0) + 1

    def count_resubmission(self, reason: str) -> None:
        self.resubmissions[reason] = self.resubmissions.get(reason, 0) + 1

    def count_pick(self, engine: str, why: str) -> None:
        self.picks[engine, why] = self.picks.get((engine, why), 0) + 1

    def count_media_error(self, code: str) -> None:
        self.media_errors[code] = self.media_errors.get(code, 0) + 1


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
