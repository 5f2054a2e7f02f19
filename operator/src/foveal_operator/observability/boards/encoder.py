"""Encoder: its cache, its work, and the path that media take to it."""

from __future__ import annotations

from foveal_operator.observability.panel import Board, Row, graph
from foveal_operator.observability.promql import DASHBOARD as D

_STAGE = "foveal_media_stage_seconds"

_CACHE = Row("Encoder cache", (
    graph("Embeddings", "Referenced by a request, kept for the next one, and free.",
          (D.total("foveal_encoder_cache_embeds", "state"), "{{state}}"),
          (D.total("foveal_encoder_cache_capacity_embeds"), "size"), stacked=False),
    graph("Hit ratio", "Items whose output was there, by modality.",
          (D.ratio("foveal_cache_hits", "foveal_cache_queries", "modality", cache="encoder"),
           "{{modality}}"), unit="percentunit", top=1),
    graph("Found in", "Device memory or the host tier behind it.",
          (D.rate("foveal_cache_hits", "tier", cache="encoder"), "{{tier}}"), unit="ops"),
    graph("Evictions", "Outputs dropped in a second.",
          (D.rate("foveal_cache_evictions", "tier,reason", cache="encoder"),
           "{{tier}} {{reason}}"), unit="ops"),
    graph("Worth of a larger cache", "Estimated hit ratio at other sizes.",
          (D.total("foveal_cache_estimated_hit_ratio", "factor", how="avg", cache="encoder"),
           "× {{factor}}"), unit="percentunit", top=1),
    graph("Seconds saved", "Encoding avoided in each second.",
          (D.rate("foveal_cache_saved_seconds", cache="encoder"), "saved"), unit="s"),
))  # fmt: skip

_WORK = Row("Work", (
    graph("Items encoded", "In a second, by modality; again: evicted lately, so a larger cache "
          "would have had them.",
          (D.rate("foveal_encoder_items", "modality"), "{{modality}}"),
          (D.rate("foveal_encoder_items_again"), "again"), unit="ops"),
    graph("Wait for the encoder", "How long a request's items did not fit its budget or cache.",
          (D.quantile(0.5, "foveal_encoder_wait_seconds"), "p50"),
          (D.quantile(0.95, "foveal_encoder_wait_seconds"), "p95"), unit="s"),
    graph("Embeddings computed", "In a second, by engine.",
          (D.rate("foveal_encoder_embeds", "pod"), "{{pod}}"), unit="ops"),
    graph("Time of an item", "In the encoder, by modality.",
          (D.quantile(0.5, _STAGE, "modality", stage="encode"), "{{modality}} p50"),
          (D.quantile(0.95, _STAGE, "modality", stage="encode"), "{{modality}} p95"), unit="s"),
    graph("Parts of a step", "Mean seconds of an engine's step.",
          (D.mean("foveal_engine_step_seconds", "part"), "{{part}}"), unit="s", stacked=True),
    graph("Tokens of a step", "Computed in one step.",
          (D.quantile(0.5, "vllm:iteration_tokens_total"), "p50"),
          (D.quantile(0.95, "vllm:iteration_tokens_total"), "p95")),
    graph("Waiting", "Requests that wait for room, or for an item's value.",
          (D.total("vllm:num_requests_waiting_by_reason", "reason"), "{{reason}}")),
))  # fmt: skip

_PATH = Row("The way there", (
    graph("Time in each stage", "p95 of one item, frontends and engines.",
          (D.quantile(0.95, _STAGE, "stage"), "{{stage}}"), unit="s", width=12),
    graph("Items in each stage", "In a second.",
          (D.rate(_STAGE, "stage", "count"), "{{stage}}"), unit="ops", width=6),
    graph("Processed", "Items that ran through a processor, by modality.",
          (D.rate("foveal_media_items_processed", "modality"), "{{modality}}"),
          unit="ops", width=6),
    graph("Media workers", "Alive, busy, items that wait for one; deaths in a second.",
          (D.total("foveal_media_workers", "pod"), "{{pod}}"),
          (D.total("foveal_media_workers_busy", "pod"), "{{pod}} busy"),
          (D.total("foveal_media_queue_length", "pod"), "{{pod}} waiting"),
          (D.rate("foveal_media_worker_restarts"), "deaths/s", "ops"),
          runbooks=("FovealMediaWorkersDying",)),
    graph("Work joined", "Items that found identical work in flight; data: URLs known by text.",
          (D.rate("foveal_media_joins", "stage"), "{{stage}}"),
          (D.rate("foveal_media_url_text_hits"), "known data: URL"), unit="ops"),
    graph("Failed fetches", "By entry of the allow-list.",
          (D.rate("foveal_media_fetch_failures", "domain"), "{{domain}}"), unit="ops"),
    graph("Refused or failed", "Items by error code, and injected ones by result.",
          (D.rate("foveal_media_errors", "code"), "{{code}}"),
          (D.rate("foveal_injected_items", "result"), "injected: {{result}}"), unit="ops"),
))  # fmt: skip

ENCODER = Board(
    uid="foveal-encoder",
    title="Foveal / Encoder and media",
    about="The encoder's cache, its work, and the path that media take to it.",
    rows=(_CACHE, _WORK, _PATH),
)
