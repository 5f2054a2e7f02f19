"""Mirror health: how well frontends know what engines hold, and the cost of errors."""

from __future__ import annotations

from foveal_operator.observability.panel import Board, Row, graph, pairs, stat
from foveal_operator.observability.promql import DASHBOARD as D

_STALE = (
    D.rate("foveal_mirror_needs", why="stale") + " / " + D.rate("foveal_cache_queries", cache="ipc")
)

_NOW = Row("Now", (
    stat("Stale hints", "Share of items whose value the engine had evicted.",
         _STALE, "percentunit", warn=0.0005, bad=0.001, width=4,
         runbooks=("FovealStaleHints",)),
    stat("Sent as hash only", "Share of items sent without their value.",
         D.ratio("foveal_mirror_hits", "foveal_mirror_queries"), "percentunit", width=4),
    stat("Session resets", "In the last hour.",
         D.total("foveal_mirror_session_resets", inner="increase(%s[1h])"), width=4),
    stat("Value conflicts", "Values that differ under one hash, in the last hour: always 0.",
         D.total("foveal_mirror_value_conflicts", inner="increase(%s[1h])"), warn=0.5, bad=1,
         width=4, runbooks=("FovealValueConflict",)),
    stat("Sessions", "The fewest sessions that an engine has.",
         D.total("foveal_mirror_sessions", how="min"), width=4),
    stat("Waiting for values", "Requests, all engines.",
         D.total("foveal_mirror_waitq_length"), width=4),
))  # fmt: skip

_HEALTH = Row("Health", (
    graph("Values requested", "By engines: stale hints, and pulls because a window was full.",
          (D.rate("foveal_mirror_needs", "why"), "{{why}}"), unit="ops"),
    graph("Sessions restarted", "By reason.",
          (D.rate("foveal_mirror_session_resets", "why"), "{{why}}"), unit="ops"),
    graph("Evictions cancelled", "Announced, then used in time; and completed ones.",
          (D.rate("foveal_mirror_limbo_rescued"), "cancelled"),
          (D.rate("foveal_cache_evictions", "reason", cache="ipc"), "evicted: {{reason}}"),
          unit="ops"),
    graph("Sources of values", "Of those to be sent: the processor cache, kept since it was made, "
          "a run of the processor, or lost.",
          (D.rate("foveal_mirror_value_sources", "source"), "{{source}}"),
          (D.rate("foveal_mirror_nofills"), "could not be rebuilt"), unit="ops"),
    graph("Wait for values", "Time a request waited in an engine until its values were there.",
          (D.quantile(0.5, "foveal_mirror_waitq_seconds"), "p50"),
          (D.quantile(0.95, "foveal_mirror_waitq_seconds"), "p95"),
          (D.total("foveal_mirror_waitq_age_seconds", how="max"), "oldest now"), unit="s"),
    graph("Rejected or duplicate", "Requests that a receiver rejected; bytes received twice.",
          (D.rate("foveal_mirror_rejects", "code"), "rejected: {{code}}"),
          (D.rate("foveal_mirror_duplicate_bytes"), "bytes twice", "Bps"), unit="ops"),
))  # fmt: skip

_PAIRS = Row("Frontends and engines", (
    graph("Items by engine", "Sent by each frontend process to each engine.",
          (D.rate("foveal_mirror_queries", "pod,process,engine"),
           "{{pod}} {{process}} → {{engine}}"), unit="ops", width=12),
    pairs("Sent as hash only, by pair", "Share of items that each frontend process sent to each "
          "engine without value.",
          (D.ratio("foveal_mirror_hits", "foveal_mirror_queries", "pod,process,engine"),
           "{{pod}} {{process}} → {{engine}}"), unit="percentunit", top=1, width=12,
          down=("pod", "process"), across=("engine",)),
    graph("Keys believed held", "By pair.",
          (D.total("foveal_mirror_keys", "pod,process,engine"),
           "{{pod}} {{process}} → {{engine}}")),
    graph("Window in use", "Value bytes not yet acknowledged, and how many may be.",
          (D.total("foveal_mirror_window_inflight_bytes", "pod,engine"), "{{pod}} → {{engine}}"),
          (D.total("foveal_mirror_window_bytes", "pod,engine"), "{{pod}} → {{engine}} granted"),
          unit="bytes"),
    graph("Engines seen", "Engines that each frontend process has a session with.",
          (D.total("foveal_engines_ready", "pod,process"), "{{pod}} {{process}}")),
))  # fmt: skip

_BYTES = Row("Bytes", (
    graph("Sent and avoided", "Value bytes in a second, by the way they took.",
          (D.rate("foveal_mirror_value_bytes_sent", "kind"), "sent: {{kind}}"),
          (D.rate("foveal_mirror_value_bytes_avoided"), "avoided"), unit="Bps", stacked=True),
    graph("Mean value", "Bytes of an item that is sent whole.",
          (D.rate("foveal_mirror_value_bytes_sent") + " / ("
           + D.rate("foveal_mirror_queries") + " - " + D.rate("foveal_mirror_hits") + ")",
           "mean"), unit="bytes"),
    graph("Mean item", "Bytes of a processed item, by modality.",
          (D.mean("foveal_media_value_bytes", "modality"), "{{modality}}"), unit="bytes"),
    graph("Shared memory", "Values written and found written already; sent inline instead, by "
          "reason.",
          (D.rate("foveal_shm_files_written"), "written"),
          (D.rate("foveal_shm_files_reused"), "reused"),
          (D.rate("foveal_shm_fallbacks", "reason"), "inline: {{reason}}"), unit="ops"),
))  # fmt: skip

MIRROR = Board(
    uid="foveal-mirror",
    title="Foveal / Mirror",
    about="Do frontends know what engines hold, and what does it cost when they err.",
    rows=(_NOW, _HEALTH, _PAIRS, _BYTES),
)
