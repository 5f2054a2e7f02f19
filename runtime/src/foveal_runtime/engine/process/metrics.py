"""An engine's counters as the declared series: the one place that knows both names.

Made by main/ next to the engine server. `EngineMetrics.collect` runs in the HTTP thread at scrape
time; it only reads numbers, so a scrape never waits for a step and may see a step's numbers half
counted.
"""

from __future__ import annotations

import threading

from foveal_runtime.engine.caches.block_pool import BlockPool
from foveal_runtime.engine.events.stream import EventStream
from foveal_runtime.engine.process.core import EngineCore
from foveal_runtime.plan.media import MODALITIES
from foveal_runtime.telemetry.metrics import Metrics


class _Saved:
    """Seconds of work that hits saved, each at the average cost when it was first seen: a counter
    must not fall when the average does. Scrapes may overlap."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_hits = 0
        self._seconds = 0.0

    def count(self, num_hits: int, cost_seconds: float, num_made: int) -> float:
        """The sum, with the hits since the last call; they wait until something was made."""
        with self._lock:
            if num_made and num_hits > self._num_hits:
                self._seconds += (num_hits - self._num_hits) * cost_seconds / num_made
                self._num_hits = num_hits
            return self._seconds


class EngineMetrics:
    """Copies one core's numbers into `metrics` whenever somebody scrapes."""

    def __init__(self, core: EngineCore, *, stream: EventStream | None = None) -> None:
        self._core = core
        self._stream = stream
        self._saved_embeds = [_Saved() for _ in MODALITIES]
        self._saved_tokens = _Saved()

    def collect(self, metrics: Metrics) -> None:
        """A telemetry source: `metrics.add_source(engine_metrics.collect)`."""
        self._requests(metrics)
        self._steps(metrics)
        self._grammars(metrics)
        self._encoder(metrics)
        self._prefix(metrics)
        self._states(metrics)
        self._values(metrics)
        self._ages(metrics)
        self._ghosts(metrics)
        self._books(metrics)

    def _requests(self, m: Metrics) -> None:
        core, stats = self._core, self._core.stats
        scheduler, seen = core.scheduler, self._core.stats.observed
        capacity, deferred = len(scheduler.waiting), len(core.receiver.admission.queue)
        m.set("vllm:num_requests_running", len(scheduler.running))
        m.set("vllm:num_requests_waiting", capacity + deferred)
        m.set("vllm:num_requests_waiting_by_reason", capacity, reason="capacity")
        m.set("vllm:num_requests_waiting_by_reason", deferred, reason="deferred")
        for name in ("awake", "weights_offloaded", "discard_all"):
            m.set("vllm:engine_sleep_state", name == "awake", sleep_state=name)
        m.set("vllm:num_preemptions", stats.num_preemptions)
        cached, prompt = stats.num_cached_prompt_tokens, stats.num_prompt_tokens
        m.set("vllm:prompt_tokens", prompt)
        m.set("vllm:prompt_tokens_by_source", prompt - cached, source="local_compute")
        m.set("vllm:prompt_tokens_by_source", cached, source="local_cache_hit")
        m.set("vllm:prompt_tokens_cached", cached)
        m.set("vllm:prompt_tokens_cached_by_source", cached, source="device")
        m.set("vllm:generation_tokens", stats.num_generation_tokens)
        if scheduler.limits.num_speculative_tokens:
            m.set("vllm:spec_decode_num_drafts", stats.num_drafts)
            m.set("vllm:spec_decode_num_draft_tokens", stats.num_draft_tokens)
            m.set("vllm:spec_decode_num_accepted_tokens", stats.num_accepted_tokens)
        m.set_histogram("vllm:request_num_preemptions", seen.preemptions)
        m.set_histogram("foveal_engine_residence_seconds", seen.residence_seconds)
        for reason, count in list(stats.finished.items()):
            m.set("foveal_engine_finished", count, reason=reason)
        for code, count in list(stats.errors.items()):
            m.set("foveal_engine_errors", count, code=code)
        m.set("foveal_engine_draining", core.is_draining)
        if self._stream is not None:
            m.set("foveal_events_published", self._stream.num_published)

    def _steps(self, m: Metrics) -> None:
        stats, seen = self._core.stats, self._core.stats.observed
        m.set("foveal_engine_steps", stats.num_steps)
        m.set("foveal_engine_steps_without_progress", stats.num_empty_passes)
        m.set_histogram("vllm:iteration_tokens_total", seen.iteration_tokens)
        for part, values in (
            ("schedule", seen.schedule_seconds),
            ("execute", seen.execute_seconds),
            ("update", seen.update_seconds),
        ):
            m.set_histogram("foveal_engine_step_seconds", values, part=part)

    def _grammars(self, m: Metrics) -> None:
        stats = self._core.runner.grammars
        m.set("foveal_engine_grammar_lookups", stats.num_lookups)
        m.set("foveal_engine_grammar_hits", stats.num_hits)
        m.set("foveal_engine_grammar_compile_seconds", stats.compile_seconds)
        m.set("foveal_engine_grammar_mask_seconds", stats.mask_seconds)
        m.set("foveal_engine_grammars_cached", stats.num_cached)
        m.set("foveal_engine_grammars_cached_bytes", stats.cached_bytes)

    def _encoder(self, m: Metrics) -> None:
        stats, cache = self._core.stats, self._core.scheduler.encoder
        per_embed = self._core.runner.traits.embed_bytes
        saved_seconds = 0.0
        for modality, count in list(cache.queries.items()):
            name = MODALITIES[modality]
            m.set("foveal_cache_queries", count, cache="encoder", modality=name, tier="device")
            for tier in ("device", "host") if cache.host.capacity_bytes else ("device",):
                hits = cache.hits.get((modality, tier), 0)
                m.set("foveal_cache_hits", hits, cache="encoder", modality=name, tier=tier)
            saved_seconds += self._saved_embeds[modality].count(
                cache.hit_embeds.get(modality, 0),
                stats.encode_seconds.get(modality, 0.0),
                stats.encoded_embeds.get(modality, 0),
            )
        m.set("foveal_cache_saved_seconds", saved_seconds, cache="encoder")
        m.set("foveal_cache_evictions", cache.num_evictions, cache="encoder", tier="device",
              reason="room")  # fmt: skip
        m.set("foveal_cache_evictions", cache.num_resets, cache="encoder", tier="device",
              reason="reset")  # fmt: skip
        held = cache.cache_size - cache.num_free_embeds
        self._sizes(m, "encoder", "device", held * per_embed, cache.cache_size * per_embed,
                    len(cache))  # fmt: skip
        host = cache.host
        if host.capacity_bytes:
            m.set("foveal_cache_evictions", cache.num_host_evictions, cache="encoder",
                  tier="host", reason="room")  # fmt: skip
            self._sizes(m, "encoder", "host", host.used_bytes, host.capacity_bytes, len(host))
        for state, embeds in (
            ("referenced", cache.num_used_embeds),
            ("freeable", cache.num_idle_embeds),
            ("free", cache.num_free_embeds),
        ):
            m.set("foveal_encoder_cache_embeds", embeds, state=state)
        m.set("foveal_encoder_cache_capacity_embeds", cache.cache_size)
        for modality, count in list(stats.encoded_items.items()):
            m.set("foveal_encoder_items", count, modality=MODALITIES[modality])
        m.set("foveal_encoder_embeds", sum(stats.encoded_embeds.values()))
        m.set("foveal_encoder_items_again", cache.num_encoded_again)
        m.set_histogram("foveal_encoder_wait_seconds", stats.observed.encoder_wait_seconds)
        for modality, times in list(stats.observed.encode_item_seconds.items()):
            m.set_histogram("foveal_media_stage_seconds", times, stage="encode",
                             modality=MODALITIES[modality])  # fmt: skip

    def _prefix(self, m: Metrics) -> None:
        stats, scheduler = self._core.stats, self._core.scheduler
        pool, limits = scheduler.pool, scheduler.limits
        queries, hits = stats.num_prefix_query_tokens, stats.num_prefix_hit_tokens
        m.set("vllm:prefix_cache_queries", queries)
        m.set("vllm:prefix_cache_hits", hits)
        for modality, count in list(stats.prefix_media_query_tokens.items()):
            found = stats.prefix_media_hit_tokens.get(modality, 0)
            queries, hits = queries - count, hits - found
            self._prefix_part(m, MODALITIES[modality], count, found)
        self._prefix_part(m, "text", queries, hits)
        m.set("foveal_cache_evictions", pool.num_evictions, cache="kv", tier="device",
              reason="room")  # fmt: skip
        m.set("vllm:kv_cache_usage_perc", scheduler.kv_usage)
        self._blocks(m, "foveal_kv_blocks", pool)
        if scheduler.windows is not None:
            windows = scheduler.windows.pool
            self._blocks(m, "foveal_kv_window_blocks", windows)
            m.set("foveal_cache_evictions", windows.num_evictions, cache="kv-window",
                  tier="device", reason="room")  # fmt: skip
        if stats.num_prefill_tokens:
            saved_seconds = self._saved_tokens.count(
                stats.num_prefix_hit_tokens, stats.prefill_seconds, stats.num_prefill_tokens
            )
            m.set("foveal_cache_saved_seconds", saved_seconds, cache="kv")
        m.set("vllm:cache_config_info", 1, block_size=str(limits.block_size),
              num_gpu_blocks=str(pool.num_blocks), cache_dtype=limits.kv_dtype,
              enable_prefix_caching=str(limits.prefix_caching))  # fmt: skip

    def _blocks(self, m: Metrics, name: str, pool: BlockPool) -> None:
        used, cached = pool.num_used_blocks, pool.num_cached_blocks
        m.set(name, used, state="active")
        m.set(name, cached, state="cached")
        m.set(name, pool.num_blocks - used - cached, state="free")

    def _prefix_part(self, m: Metrics, modality: str, queries: int, hits: int) -> None:
        m.set("foveal_cache_queries", queries, cache="kv", modality=modality, tier="device")
        m.set("foveal_cache_hits", hits, cache="kv", modality=modality, tier="device")

    def _states(self, m: Metrics) -> None:
        m.set("foveal_prefix_tokens_without_state", self._core.stats.num_stateless_tokens)
        snapshots = self._core.scheduler.snapshots
        if snapshots is None:
            return
        pool, each = snapshots.pool, self._core.runner.traits.state_bytes
        held = pool.num_used_blocks + pool.num_cached_blocks
        self._sizes(m, "state", "device", held * each, pool.num_blocks * each, held)
        m.set("foveal_cache_evictions", pool.num_evictions, cache="state", tier="device",
              reason="room")  # fmt: skip

    def _ages(self, m: Metrics) -> None:
        core, snapshots = self._core, self._core.scheduler.snapshots
        windows = core.scheduler.windows
        for cache, tier, ages in (
            ("ipc", "host", core.value_ages),
            ("encoder", "device", core.scheduler.encoder.ages),
            ("kv", "device", core.scheduler.pool.ages),
            *([("state", "device", snapshots.pool.ages)] if snapshots else []),
            *([("kv-window", "device", windows.pool.ages)] if windows else []),
        ):
            m.set_histogram("foveal_cache_eviction_age_seconds", ages.seen, cache=cache, tier=tier)

    def _values(self, m: Metrics) -> None:
        core, stats = self._core, self._core.stats
        receiver = core.receiver
        store, mirror = receiver.store, receiver.stats
        # Its queries and hits are the frontends' to count: once per item, wherever it is answered.
        self._sizes(m, "ipc", "host", store.used_bytes, store.capacity_bytes, store.num_entries)
        for reason, count in (
            ("limbo", store.num_evicted_limbo), ("forced", store.num_evicted_forced),
        ):  # fmt: skip
            m.set("foveal_cache_evictions", count, cache="ipc", tier="host", reason=reason)
        staged = sum(entry.staged_bytes for entry in list(receiver.sessions.values()))
        for state, size in (
            ("idle", store.idle_bytes), ("pinned", store.pinned_bytes),
            ("reserved", store.reserved_bytes), ("limbo", store.limbo_bytes),
            ("staged", staged + store.bypass_bytes),
        ):  # fmt: skip
            m.set("foveal_mirror_store_bytes", size, state=state)
        m.set("foveal_mirror_needs", mirror.num_needs_stale, why="stale")
        m.set("foveal_mirror_needs", mirror.num_needs_pull, why="pull")
        m.set("foveal_mirror_limbo_rescued", store.num_rescued)
        m.set("foveal_mirror_duplicate_bytes", mirror.dup_bytes)
        differing = mirror.num_value_conflicts + mirror.num_damaged_values
        m.set("foveal_mirror_value_conflicts", differing)
        m.set("foveal_cache_refused", mirror.num_bypass_requests, cache="ipc")
        for code, count in list(mirror.rejects.items()):
            m.set("foveal_mirror_rejects", count, code=code)
        m.set("foveal_mirror_waitq_length", len(receiver.admission.queue))
        m.set("foveal_mirror_waitq_age_seconds", core.oldest_wait_seconds())
        m.set_histogram("foveal_mirror_waitq_seconds", stats.observed.values_seconds)
        m.set("foveal_mirror_sessions", len(receiver.sessions))

    def _ghosts(self, m: Metrics) -> None:
        core = self._core
        for cache, ghosts in (
            ("ipc", core.value_ghosts),
            ("encoder", core.scheduler.encoder.ghosts),
            ("kv", core.scheduler.block_ghosts),
        ):
            for factor, ratio in ghosts.ratios().items():
                m.set("foveal_cache_estimated_hit_ratio", ratio, cache=cache, factor=f"{factor:g}")

    def _books(self, m: Metrics) -> None:
        """How full what ENGINE_BOOKS bounds is."""
        core, scheduler, receiver = self._core, self._core.scheduler, self._core.receiver
        lists = (core.value_ghosts, scheduler.encoder.ghosts, scheduler.block_ghosts)
        for book, entries in (
            ("uuids", len(receiver.bindings.table)),
            ("departed", len(receiver.admission.departed)),
            ("evicted", scheduler.encoder.ages.num_lately),
            ("ghosts", sum(each.num_keys for each in lists)),
            ("events", self._stream.held_bytes / 1024 if self._stream else 0),
            ("quarantine", len(receiver.refusals.entries)),
        ):
            m.set("foveal_book_entries", entries, book=book)

    def _sizes(
        self, m: Metrics, cache: str, tier: str, held: int, capacity: int, entries: int
    ) -> None:
        m.set("foveal_cache_bytes", held, cache=cache, tier=tier)
        m.set("foveal_cache_capacity_bytes", capacity, cache=cache, tier=tier)
        m.set("foveal_cache_entries", entries, cache=cache, tier=tier)
