"""Caches: every cache against its budget, what it finds, and what another size would find."""

from __future__ import annotations

from foveal_operator.observability.panel import Board, Panel, Row, graph, table
from foveal_operator.observability.promql import DASHBOARD as D

_SHARE = (
    D.total("foveal_cache_bytes", "pod,process,cache,tier")
    + " / "
    + D.total("foveal_cache_capacity_bytes", "pod,process,cache,tier")
)


def _ghosts(cache: str, name: str) -> Panel:
    return graph(
        f"Working set: {name}",
        "Estimated hit ratio if the cache had this many times its size: should it be larger?",
        (D.total("foveal_cache_estimated_hit_ratio", "factor", how="avg", cache=cache),
         "× {{factor}}"),
        unit="percentunit", top=1, width=6,
    )  # fmt: skip


_EACH = Row("Each cache", (
    table("Each cache", "All processes together. KV memory is counted in blocks, the others in "
          "bytes.", ("cache", "tier"),
          (D.ratio("foveal_cache_hits", "foveal_cache_queries", "cache,tier"), "hit ratio",
           "percentunit"),
          (D.rate("foveal_cache_queries", "cache,tier"), "lookups/s"),
          (D.total("foveal_cache_bytes", "cache,tier"), "held", "bytes"),
          (D.total("foveal_cache_capacity_bytes", "cache,tier"), "budget", "bytes"),
          (D.total("foveal_cache_bytes", "cache,tier") + " / "
           + D.total("foveal_cache_capacity_bytes", "cache,tier"), "used", "percentunit"),
          (D.total("foveal_cache_entries", "cache,tier"), "entries"),
          (D.rate("foveal_cache_evictions", "cache,tier"), "evictions/s")),
))  # fmt: skip

_SIZE = Row("Budget and use", (
    graph("Held", "Bytes in each cache, all pods together.",
          (D.total("foveal_cache_bytes", "cache,tier"), "{{cache}} {{tier}}"),
          unit="bytes", stacked=True),
    graph("Budget", "Bytes that each cache may hold.",
          (D.total("foveal_cache_capacity_bytes", "cache,tier"), "{{cache}} {{tier}}"),
          unit="bytes", stacked=True),
    graph("Used share of the budget", "By process and cache.",
          (_SHARE, "{{pod}} {{process}} {{cache}} {{tier}}"), unit="percentunit", top=1),
    graph("Entries", "Items, outputs or blocks held.",
          (D.total("foveal_cache_entries", "cache,tier"), "{{cache}} {{tier}}")),
    graph("KV blocks", "By state, all engines.",
          (D.total("foveal_kv_blocks", "state"), "{{state}}"), stacked=True),
    graph("KV blocks of windows", "Of layers with a sliding window, where they have their own.",
          (D.total("foveal_kv_window_blocks", "state"), "{{state}}"), stacked=True),
    graph("Value pool", "The engines' value pool by state of its bytes.",
          (D.total("foveal_mirror_store_bytes", "state"), "{{state}}"),
          unit="bytes", stacked=True),
))  # fmt: skip

_HITS = Row("Hits", (
    graph("Hit ratio by cache and modality", "Over the window; kv counts tokens.",
          (D.ratio("foveal_cache_hits", "foveal_cache_queries", "cache,modality"),
           "{{cache}} {{modality}}"), unit="percentunit", top=1, width=12),
    graph("Lookups", "In a second; kv counts tokens and is left out here.",
          (D.rate("foveal_cache_queries", "cache,modality", cache="!kv"),
           "{{cache}} {{modality}}"), unit="ops", width=6),
    graph("Hits by tier", "Where it was found.",
          (D.rate("foveal_cache_hits", "cache,tier", cache="!kv"), "{{cache}} {{tier}}"),
          unit="ops", width=6),
    graph("Prefix cache", "Prompt tokens found of those looked up, by engine.",
          (D.ratio("vllm:prefix_cache_hits", "vllm:prefix_cache_queries", "pod"), "{{pod}}"),
          unit="percentunit", top=1),
    graph("Work saved", "Estimated seconds of work avoided in each second.",
          (D.rate("foveal_cache_saved_seconds", "cache"), "{{cache}}"), unit="s"),
    graph("Evictions", "Entries removed in a second, by reason.",
          (D.rate("foveal_cache_evictions", "cache,tier,reason"),
           "{{cache}} {{tier}} {{reason}}"), unit="ops"),
))  # fmt: skip

_TURNOVER = Row("Turnover", (
    graph("Age at eviction", "How long what was evicted had lain unused (median): below the time "
          "after which clients come back, the cache is too small.",
          (D.quantile(0.5, "foveal_cache_eviction_age_seconds", "cache,tier"),
           "{{cache}} {{tier}}"), unit="s"),
    graph("Cannot be evicted", "Bytes of the value pool in use by requests, or kept for values on "
          "their way, by engine.",
          (D.total("foveal_mirror_store_bytes", "pod", state="pinned"), "{{pod}} pinned"),
          (D.total("foveal_mirror_store_bytes", "pod", state="reserved"), "{{pod}} reserved"),
          unit="bytes"),
    graph("Past the cache", "Items larger than the processor cache, requests that do not fit the "
          "value pool, in a second.",
          (D.rate("foveal_cache_refused", "cache"), "{{cache}}"), unit="ops"),
))  # fmt: skip

_SIZES = Row("Would more memory help?", (
    _ghosts("processor", "processor cache"),
    _ghosts("ipc", "value pool"),
    _ghosts("encoder", "encoder cache"),
    _ghosts("kv", "prefix cache"),
    table("Would more memory help?", "Estimated hit ratio over the recent past, were the cache "
          "this many times its size.", ("cache",),
          *((D.total("foveal_cache_estimated_hit_ratio", "cache", how="avg", factor=factor),
             f"× {factor}", "percentunit") for factor in ("0.5", "1", "2", "4"))),
))  # fmt: skip

CACHES = Board(
    uid="foveal-caches",
    title="Foveal / Caches",
    about="Every cache against its budget, what it finds, and what another size would find.",
    rows=(_EACH, _SIZE, _HITS, _TURNOVER, _SIZES),
)
