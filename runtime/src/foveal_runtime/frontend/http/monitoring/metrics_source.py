"""The media path's and the mirrors' counters as metrics, copied at scrape time.

main/ registers `media_source` with the process's Metrics, app.py `text_source`. Reads plain
counters only.
"""

from __future__ import annotations

from collections.abc import Callable

from foveal_runtime.frontend.common.stats import FrontendStats
from foveal_runtime.frontend.engines.client import EngineClient
from foveal_runtime.frontend.engines.link import EngineLink
from foveal_runtime.frontend.engines.shared_values import SharedValues
from foveal_runtime.frontend.grammars.compiler import Compiler
from foveal_runtime.frontend.items.input_processor import MediaInput
from foveal_runtime.frontend.text.tokenizer import TextTokenizer
from foveal_runtime.plan.media import MODALITIES
from foveal_runtime.plan.metrics import METRICS
from foveal_runtime.plan.metrics.foveal import SESSION_ENDS
from foveal_runtime.telemetry.metrics import Metrics

_BY_ENGINE = [
    metric.name for metric in METRICS
    if metric.name.startswith("foveal_") and "engine" in metric.labels
]  # fmt: skip
_CACHE = {"cache": "processor", "tier": "host"}


def media_source(
    stats: FrontendStats, processor: MediaInput, client: EngineClient
) -> Callable[[Metrics], None]:
    """For `Metrics.add_source`."""

    def copy(metrics: Metrics) -> None:
        _items(metrics, stats)
        _processor_cache(metrics, processor)
        _media(metrics, stats, processor)
        if client.shared is not None:
            _shared(metrics, client.shared)
        metrics.set("foveal_requests_quarantined", client.quarantine.num_convicted)
        metrics.set("foveal_quarantine_entries", len(client.quarantine))
        _books(metrics, processor, client)
        for name in _BY_ENGINE:
            metrics.clear(name)  # engines come and go, and their names with them
        for link in client.links():
            _mirror(metrics, link)
        _picks(metrics, stats, {link.name for link in client.links()})

    return copy


def text_source(tokenizer: TextTokenizer, grammars: Compiler) -> Callable[[Metrics], None]:
    """For `Metrics.add_source`: how full the books of texts are."""

    def copy(metrics: Metrics) -> None:
        metrics.set("foveal_book_entries", tokenizer.num_spelled, book="tokens")
        metrics.set("foveal_book_entries", grammars.known_bytes / 1024, book="grammars")

    return copy


def _items(metrics: Metrics, stats: FrontendStats) -> None:
    metrics.set("vllm:mm_cache_queries", sum(stats.mm_queries))
    metrics.set("vllm:mm_cache_hits", sum(stats.mm_hits))
    for modality, queries, hits, processed in zip(
        MODALITIES, stats.mm_queries, stats.mm_hits, stats.processed_items, strict=True
    ):
        ipc = {"cache": "ipc", "tier": "host", "modality": modality}
        metrics.set("foveal_cache_queries", queries, **ipc)
        metrics.set("foveal_cache_hits", hits, **ipc)
        metrics.set("foveal_media_items_processed", processed, modality=modality)
    for modality, sizes in zip(MODALITIES, stats.value_bytes, strict=True):
        metrics.set_histogram("foveal_media_value_bytes", sizes, modality=modality)
    metrics.set_histogram("foveal_event_loop_lag_seconds", stats.loop_lags)
    for reason, count in stats.resubmissions.items():
        metrics.set("foveal_request_resubmissions", count, reason=reason)


def _picks(metrics: Metrics, stats: FrontendStats, names: set[str]) -> None:
    for engine, why in [key for key in stats.picks if key[0] not in names]:
        del stats.picks[engine, why]
    for (engine, why), count in stats.picks.items():
        metrics.set("foveal_routing_picks", count, engine=engine, why=why)


def _processor_cache(metrics: Metrics, processor: MediaInput) -> None:
    cache = processor.cache
    metrics.set("foveal_cache_queries", cache.queries, modality="", **_CACHE)
    metrics.set("foveal_cache_hits", cache.hits, modality="", **_CACHE)
    metrics.set("foveal_cache_evictions", cache.evictions, reason="capacity", **_CACHE)
    metrics.set("foveal_cache_refused", cache.refused, cache="processor")
    metrics.set_histogram("foveal_cache_eviction_age_seconds", cache.ages.seen, **_CACHE)
    metrics.set("foveal_cache_bytes", cache.used_bytes, **_CACHE)
    metrics.set("foveal_cache_capacity_bytes", cache.capacity_bytes, **_CACHE)
    metrics.set("foveal_cache_entries", len(cache), **_CACHE)
    for factor, ratio in cache.ghosts.ratios().items():
        metrics.set("foveal_cache_estimated_hit_ratio", ratio, cache="processor",
                    factor=f"{factor:g}")  # fmt: skip


def _media(metrics: Metrics, stats: FrontendStats, processor: MediaInput) -> None:
    for stage, times in stats.stages.items():
        metrics.set_histogram("foveal_media_stage_seconds", times, stage=stage, modality="")
    metrics.set("foveal_media_fetched_bytes", processor.fetcher.fetched_bytes)
    metrics.set("foveal_media_joins", processor.fetcher.flights.joins, stage="fetch")
    metrics.set("foveal_media_joins", processor.processing.joins, stage="process")
    metrics.set("foveal_media_url_text_hits", stats.url_text_hits)
    metrics.set("foveal_media_workers", processor.workers.num_ready)
    metrics.set("foveal_media_workers_busy", processor.workers.num_busy)
    metrics.set("foveal_media_queue_length", processor.workers.queue_length)
    for domain, count in processor.fetcher.failures.items():
        metrics.set("foveal_media_fetch_failures", count, domain=domain)
    metrics.set("foveal_media_worker_restarts", processor.workers.restarts, reason="died")
    metrics.set("foveal_injected_items", stats.injected, result="accepted")
    metrics.set("foveal_injected_items", stats.injection_failures, result="refused")
    for code, count in stats.media_errors.items():
        metrics.set("foveal_media_errors", count, code=code)
    for source, count in stats.value_source.items():
        metrics.set("foveal_mirror_value_sources", count, source=source)


def _books(metrics: Metrics, processor: MediaInput, client: EngineClient) -> None:
    """How full what FRONTEND_BOOKS and MIRROR_UUIDS_BYTES bound is."""
    for book, entries in (
        ("uuids", len(processor.aliases)),
        ("data_urls", len(processor.url_texts)),
        ("routes", len(client.router)),
        ("ghosts", processor.cache.ghosts.num_keys),
        ("quarantine", len(client.quarantine.book.entries)),
        ("engine_uuids", sum(len(link.sender.bindings) for link in client.links())),
        ("deaths", client.quarantine.num_deaths),
        ("documents", len(processor.documents)),
    ):
        metrics.set("foveal_book_entries", entries, book=book)


def _shared(metrics: Metrics, shared: SharedValues) -> None:
    writer = shared.writer
    metrics.set("foveal_shm_bytes", writer.used_bytes)
    metrics.set("foveal_shm_capacity_bytes", writer.budget_bytes)
    metrics.set("foveal_shm_files_written", writer.num_written)
    metrics.set("foveal_shm_files_reused", writer.num_reused)
    metrics.set("foveal_shm_swept_writers", writer.num_swept)
    for reason, count in shared.fallbacks.items():
        metrics.set("foveal_shm_fallbacks", count, reason=reason)


def _mirror(metrics: Metrics, link: EngineLink) -> None:
    sender, engine = link.sender, link.name
    stats = sender.stats
    metrics.set("foveal_mirror_queries", stats.num_queries, engine=engine)
    metrics.set("foveal_mirror_hits", stats.num_hits, engine=engine)
    metrics.set("foveal_mirror_pulls", stats.num_pulls, engine=engine)
    metrics.set("foveal_mirror_needs_received", stats.num_needs, engine=engine)
    metrics.set("foveal_mirror_nofills", stats.num_nofill, engine=engine)
    metrics.set("foveal_mirror_value_bytes_avoided", stats.bytes_avoided, engine=engine)
    for kind, count in stats.bytes_sent.items():
        metrics.set("foveal_mirror_value_bytes_sent", count, engine=engine, kind=kind)
    for why, count in {**dict.fromkeys(SESSION_ENDS, 0), **stats.session_resets}.items():
        metrics.set("foveal_mirror_session_resets", count, engine=engine, why=why)
    if sender.is_up:
        metrics.set("foveal_mirror_keys", len(sender.confirmed), engine=engine)
        metrics.set("foveal_mirror_window_inflight_bytes", sender.inflight_bytes, engine=engine)
        metrics.set("foveal_mirror_window_bytes", sender.window_bytes, engine=engine)
