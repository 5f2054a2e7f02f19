"""Caches: every cache against its budget, what it finds, and what another size would find."""

from __future__ import annotations

from foveal_operator.observability.panel import Board, Panel, Row, graph
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
    graph("Age of what is evicted", "How long it had lain unused, p50: short lives mean that the "
          "cache is too small.",
          (D.quantile(0.5, "foveal_cache_eviction_age_seconds", "cache,tier"),
           "{{cache}} {{tier}}"), unit="s"),
    graph("Served without the cache", "Items or requests in a second that do not fit.",
          (D.rate("foveal_cache_refused", "cache"), "{{cache}}"), unit="ops"),
))  # fmt: skip

_SIZES = Row("Would more memory help?", (
    _ghosts("processor", "processor cache"),
    _ghosts("ipc", "value pool"),
    _ghosts("encoder", "encoder cache"),
    _ghosts("kv", "prefix cache"),
))  # fmt: skip

CACHES = Board(
    uid="foveal-caches",
    title="Foveal / Caches",
    about="Every cache against its budget, what it finds, and what another size would find.",
    rows=(_SIZE, _HITS, _SIZES),
)
