"""Foveal's own families: every cache by one schema, the mirror, the media path, engine and budget.

Label `process` names the exporting process (frontend-0/1, engine-0), so that values of several
processes stand side by side and never mix. `cache` is processor, ipc, encoder, kv or state
(snapshots of recurrent state); `tier` is device, host, disk or "".
"""

from __future__ import annotations

from foveal_runtime.plan.metrics.metric import (
    AGE_BUCKETS,
    BYTE_BUCKETS,
    REQUEST_BUCKETS,
    STAGE_BUCKETS,
    TTFT_BUCKETS,
    Metric,
    Role,
    family,
)

_P = ("model_name", "process")
_FRONTEND: tuple[Role, ...] = ("frontend",)
_ENGINE: tuple[Role, ...] = ("engine",)
_BOTH: tuple[Role, ...] = ("frontend", "engine")

_MEDIA_CODES = ("media_invalid", "media_too_large", "media_unknown", "media_forbidden",
                "media_conflict", "media_fetch_failed")  # fmt: skip
_GRAMMAR_CODES = ("schema_invalid", "schema_unsupported", "schema_too_large", "schema_too_slow",
                  "grammar_invalid")  # fmt: skip
_REQUEST_CODES = ("invalid_request_error", "context_length_exceeded", "unsupported_feature",
                  *_GRAMMAR_CODES,
                  "overloaded", "rate_limit_exceeded", "no_engine", "engine_error",
                  "internal_error", "invalid_api_key", "not_found", "request_quarantined",
                  "upload_too_slow")  # fmt: skip
SESSION_ENDS = ("disconnected", "gap", "silent", "unknown_session")
"""Why sessions with engines end that had been open; others are refused while they open."""


_one = family("foveal_", _P)

_CACHES = (
    _one(_BOTH, "counter", "cache_queries", "Lookups: items (kv: tokens; ipc: counted by "
         "frontends, once per item and request).",
         "cache", "modality", "tier"),
    _one(_BOTH, "counter", "cache_hits", "Lookups that found what they looked for.",
         "cache", "modality", "tier"),
    _one(_BOTH, "counter", "cache_evictions", "Entries removed to make room, by reason.",
         "cache", "tier", "reason"),
    _one(_BOTH, "histogram", "cache_eviction_age_seconds", "How long what was evicted to make room "
         "had lain unused.", "cache", "tier", unit="seconds", buckets=AGE_BUCKETS),
    _one(_BOTH, "counter", "cache_refused", "processor: items larger than the cache; ipc: requests "
         "whose items do not fit beside what is in use. Served without it.", "cache"),
    _one(_BOTH, "gauge", "cache_bytes", "Bytes held.", "cache", "tier", unit="bytes"),
    _one(_BOTH, "gauge", "cache_capacity_bytes", "Bytes that may be held.", "cache", "tier",
         unit="bytes"),
    _one(_BOTH, "gauge", "cache_entries", "Entries held.", "cache", "tier"),
    _one(_BOTH, "gauge", "cache_estimated_hit_ratio", "Hit ratio over the recent past if the "
         "cache had this many times its size (a list of ghosts).", "cache", "factor"),
    _one(_BOTH, "counter", "cache_saved_seconds", "Estimated work avoided by hits, each at the "
         "average cost of that work so far.", "cache", unit="seconds"),
)  # fmt: skip

_MIRROR_FRONTEND = (
    _one(_FRONTEND, "counter", "mirror_value_bytes_sent", "Item values sent to an engine.",
         "engine", "kind", unit="bytes"),
    _one(_FRONTEND, "counter", "mirror_value_bytes_avoided", "Item values an engine was believed "
         "to hold, sent as a hash alone.", "engine", unit="bytes"),
    _one(_FRONTEND, "counter", "mirror_queries", "Items sent to an engine.", "engine"),
    _one(_FRONTEND, "counter", "mirror_hits", "Items sent as a hash alone.", "engine"),
    _one(_FRONTEND, "counter", "mirror_pulls", "Items sent by key because the window was full.",
         "engine"),
    _one(_FRONTEND, "counter", "mirror_needs_received", "Values an engine requested.", "engine"),
    _one(_FRONTEND, "counter", "mirror_nofills", "Values that could not be rebuilt.", "engine"),
    _one(_FRONTEND, "counter", "mirror_session_resets", "Sessions restarted.", "engine", "why"),
    _one(_FRONTEND, "counter", "mirror_value_sources", "Sources of values to be sent.",
         "source", known=(("source", ("processor_cache", "retained", "recomputed", "lost")),)),
    _one(_FRONTEND, "gauge", "mirror_keys", "Keys believed to be in an engine's cache.", "engine"),
    _one(_FRONTEND, "gauge", "mirror_window_inflight_bytes", "Value bytes not yet acknowledged.",
         "engine", unit="bytes"),
    _one(_FRONTEND, "gauge", "mirror_window_bytes", "Value bytes that may be unacknowledged: the "
         "window that an engine granted.", "engine", unit="bytes"),
)  # fmt: skip

_MIRROR_ENGINE = (
    _one(_ENGINE, "gauge", "mirror_store_bytes", "Value pool by state: idle, pinned, reserved, "
         "limbo, staged.", "state", unit="bytes"),
    _one(_ENGINE, "counter", "mirror_needs", "Values requested: stale (it had been announced) or "
         "pull.", "why"),
    _one(_ENGINE, "counter", "mirror_limbo_rescued", "Announced evictions cancelled by a new use."),
    _one(_ENGINE, "counter", "mirror_duplicate_bytes", "Values received twice.", unit="bytes"),
    _one(_ENGINE, "counter", "mirror_value_conflicts", "Values that differ under one hash."),
    _one(_ENGINE, "counter", "mirror_rejects", "Requests refused by the receiver.", "code",
         known=(("code", ("mm_too_large", "mm_source_lost", "media_conflict", "overloaded")),)),
    _one(_ENGINE, "gauge", "mirror_waitq_length", "Requests that wait for values."),
    _one(_ENGINE, "gauge", "mirror_waitq_age_seconds", "Age of the oldest of them.",
         unit="seconds"),
    _one(_ENGINE, "histogram", "mirror_waitq_seconds", "Time a request waited for values.",
         unit="seconds", buckets=STAGE_BUCKETS),
    _one(_ENGINE, "gauge", "mirror_sessions", "Frontends with a session."),
)  # fmt: skip

_MEDIA = (
    _one(_BOTH, "histogram", "media_stage_seconds", "One item in one stage: fetch, decode, hash, "
         "process, send, queue (frontends), encode (engines).", "stage", "modality",
         unit="seconds", buckets=STAGE_BUCKETS),
    _one(_FRONTEND, "counter", "requests_quarantined", "Requests that ended because engines died "
         "of them, and whose like is refused for ten minutes."),
    _one(_FRONTEND, "gauge", "quarantine_entries", "Kinds of requests that are refused now."),
    _one(_FRONTEND, "counter", "media_joins", "Work that joined identical work in flight.",
         "stage"),
    _one(_FRONTEND, "counter", "media_items_processed", "Items that ran through a processor.",
         "modality"),
    _one(_FRONTEND, "counter", "media_errors", "Items refused or failed, by error code.", "code",
         known=(("code", _MEDIA_CODES),)),
    _one(_FRONTEND, "counter", "media_fetch_failures", "Fetches that failed, by the entry of the "
         "allow-list; other: none of them.", "domain"),
    _one(_FRONTEND, "histogram", "media_value_bytes", "Size of a processed item, once per item and "
         "request.", "modality", unit="bytes", buckets=BYTE_BUCKETS),
    _one(_FRONTEND, "gauge", "media_queue_length", "Items that wait for a media worker."),
    _one(_FRONTEND, "gauge", "media_workers_busy", "Media workers that have an item."),
    _one(_FRONTEND, "counter", "media_fetched_bytes", "Bytes fetched from URLs.", unit="bytes"),
    _one(_FRONTEND, "counter", "media_url_text_hits", "data: URLs known by their text, not even "
         "decoded."),
    _one(_FRONTEND, "counter", "media_worker_restarts", "Media workers that died, by reason.",
         "reason"),
    _one(_FRONTEND, "gauge", "media_workers", "Media workers alive."),
    _one(_FRONTEND, "gauge", "media_inflight_bytes", "Request bodies and media held by requests "
         "in flight.", unit="bytes"),
    _one(_FRONTEND, "counter", "injected_items", "Items injected from outside, by result.",
         "result"),
    _one(_FRONTEND, "gauge", "shm_bytes", "Shared memory in use.", unit="bytes"),
    _one(_FRONTEND, "gauge", "shm_capacity_bytes", "Shared memory that may be used.",
         unit="bytes"),
    _one(_FRONTEND, "counter", "shm_files_written", "Values written to shared memory."),
    _one(_FRONTEND, "counter", "shm_files_reused", "Values that were there already when an engine "
         "was to get them."),
    _one(_FRONTEND, "counter", "shm_fallbacks", "Values sent inline to an engine of this node: "
         "no_room, write_failed, engine_blind.", "reason"),
    _one(_FRONTEND, "counter", "shm_swept_writers", "Folders of dead processes removed at start."),
)  # fmt: skip

_DOOR = (
    _one(_FRONTEND, "gauge", "requests_inflight", "HTTP requests being answered."),
    _one(_FRONTEND, "gauge", "prompt_tokens_inflight", "Prompt tokens of those, media not "
         "expanded.", unit="tokens"),
    _one(_FRONTEND, "counter", "request_errors", "Requests that ended with an error, by code.",
         "code", known=(("code", (*_MEDIA_CODES, *_REQUEST_CODES)),)),
    _one(_FRONTEND, "counter", "client_disconnects", "Requests whose client went away."),
    _one(_FRONTEND, "counter", "constrained_requests", "Requests whose output must follow a "
         "schema or grammar.", "kind",
         known=(("kind", ("json", "regex", "choice", "grammar", "structural_tag")),)),
    _one(_FRONTEND, "counter", "grammars_refused", "Schemas and grammars refused, by code.",
         "code", known=(("code", _GRAMMAR_CODES),)),
    _one(_FRONTEND, "histogram", "grammar_compile_seconds", "Time to compile a schema or grammar "
         "that was not known yet, waiting included.", unit="seconds", buckets=STAGE_BUCKETS),
    _one(_FRONTEND, "counter", "request_resubmissions", "Sequences sent to another engine.",
         "reason",
         known=(("reason", ("engine_abort", "overloaded", "draining", *SESSION_ENDS)),)),
    _one(_FRONTEND, "counter", "routing_picks", "Attempts sent, by the router's reason: only, "
         "held, remembered, load.", "engine", "why"),
    _one(_FRONTEND, "histogram", "first_token_seconds", "Time to the first token by media: text "
         "(none), hit (the engine held every item), miss.", "media", unit="seconds",
         buckets=TTFT_BUCKETS, known=(("media", ("text", "hit", "miss")),), is_traced=True),
    _one(_FRONTEND, "histogram", "event_loop_lag_seconds", "By how much the process's event loop "
         "was late.", unit="seconds", buckets=STAGE_BUCKETS),
    _one(_BOTH, "gauge", "startup_seconds", "Parts of the process's start: imports, then workers "
         "(frontends) or load, warm, caches (engines).", "phase", unit="seconds"),
    _one(_FRONTEND, "gauge", "engines_ready", "Engines with a compatible session."),
    _one(_FRONTEND, "gauge", "engines_requests_waiting", "Requests that wait in the engines behind "
         "it, for endpoint pickers."),
    _one(_FRONTEND, "gauge", "engines_kv_cache_usage", "Share of KV blocks in use in the fullest "
         "of the engines behind it, 0 to 1, for endpoint pickers."),
    _one(_FRONTEND, "gauge", "ready", "1 while /readyz says yes."),
    _one(_FRONTEND, "gauge", "draining", "1 while shutting down."),
    _one(_BOTH, "gauge", "build_info", "Always 1; the version as a label.", "version"),
    _one(_FRONTEND, "gauge", "metrics_peers_unreachable", "Peers whose /metrics are missing from "
         "this answer."),
    _one(_FRONTEND, "histogram", "request_media_seconds", "From arrival until the request could be "
         "routed.", unit="seconds", buckets=STAGE_BUCKETS, is_traced=True),
)  # fmt: skip

_ENGINE_WORK = (
    _one(_ENGINE, "counter", "engine_steps", "Steps run."),
    _one(_ENGINE, "counter", "engine_steps_without_progress", "Steps that had work and scheduled "
         "nothing."),
    _one(_ENGINE, "histogram", "engine_step_seconds", "A step's parts: schedule, execute, update.",
         "part", unit="seconds", buckets=STAGE_BUCKETS),
    _one(_ENGINE, "counter", "engine_grammar_lookups", "Sequences whose output a grammar binds."),
    _one(_ENGINE, "counter", "engine_grammar_hits", "Those that found their grammar compiled."),
    _one(_ENGINE, "counter", "engine_grammar_compile_seconds", "Time spent compiling grammars.",
         unit="seconds"),
    _one(_ENGINE, "counter", "engine_grammar_mask_seconds", "Time spent finding out which tokens "
         "grammars allow.", unit="seconds"),
    _one(_ENGINE, "gauge", "engine_grammars_cached", "Compiled grammars held."),
    _one(_ENGINE, "gauge", "engine_grammars_cached_bytes", "Text of the compiled grammars held.",
         unit="bytes"),
    _one(_ENGINE, "counter", "engine_finished", "Sequences that ended here, by reason.", "reason"),
    _one(_ENGINE, "counter", "engine_errors", "Sequences that failed here, by code.", "code"),
    _one(_ENGINE, "histogram", "engine_residence_seconds", "From a request's arrival at this "
         "engine to its end.", unit="seconds", buckets=REQUEST_BUCKETS),
    _one(_ENGINE, "gauge", "engine_draining", "1 while the engine takes no new requests."),
    _one(_ENGINE, "counter", "encoder_items", "Items encoded.", "modality"),
    _one(_ENGINE, "counter", "encoder_items_again", "Items encoded although they had been before: "
         "evicted lately."),
    _one(_ENGINE, "histogram", "encoder_wait_seconds", "How long a request's next items did not "
         "fit the encoder's budget or cache; 0 when they did at once.", unit="seconds",
         buckets=STAGE_BUCKETS),
    _one(_ENGINE, "counter", "encoder_embeds", "Embeddings computed.", unit="embeds"),
    _one(_ENGINE, "gauge", "encoder_cache_embeds", "Embeddings in the encoder cache by state: "
         "referenced, freeable, free.", "state", unit="embeds"),
    _one(_ENGINE, "gauge", "encoder_cache_capacity_embeds", "Its size.", unit="embeds"),
    _one(_ENGINE, "gauge", "kv_blocks", "KV blocks by state: active, cached, free.", "state",
         unit="blocks"),
    _one(_ENGINE, "gauge", "kv_window_blocks", "KV blocks of layers with a sliding window by "
         "state: active, cached, free, where they have a pool of their own.", "state",
         unit="blocks"),
    _one(_ENGINE, "counter", "prefix_tokens_without_state", "Tokens of prompts whose KV was cached "
         "but which were computed again, as no snapshot of recurrent state, or not all of a "
         "sliding window, was there.",
         unit="tokens"),
    _one(_ENGINE, "counter", "events_published", "Cache events on the event stream."),
    _one(_BOTH, "gauge", "book_entries", "What the process remembers besides its caches, by book; "
         "plans have room for as many as there can be. events, grammars: KiB.", "book"),
    _one(_BOTH, "gauge", "memory_peak_bytes", "The most memory the container ever had, as its "
         "control group counts it.", unit="bytes"),
    _one(_BOTH, "gauge", "memory_limit_bytes", "What it may have; 0 = no limit.", unit="bytes"),
    _one(_BOTH, "gauge", "memory_used_bytes", "Of that, what it has now: anonymous, shared and "
         "kernel memory; 0 without a limit.", unit="bytes"),
    _one(_BOTH, "gauge", "memory_page_cache_bytes", "Files that the kernel keeps for it and takes "
         "back when memory is short.", unit="bytes"),
    _one(_BOTH, "gauge", "budget_bytes", "A part of the process's memory: planned, and as "
         "measured.", "part", "source", unit="bytes"),
)  # fmt: skip

FOVEAL_METRICS: tuple[Metric, ...] = (
    *_CACHES,
    *_MIRROR_FRONTEND,
    *_MIRROR_ENGINE,
    *_MEDIA,
    *_DOOR,
    *_ENGINE_WORK,
)
