"""Counters of an engine: plain numbers, no client library.

Written by `scheduler` and `core`, read by `metrics`, which maps them to the declared series.
Counters only grow; observations wait in bounded queues until they are collected.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

_PENDING = 8192


def _queue() -> deque[float]:
    return deque(maxlen=_PENDING)


@dataclass(slots=True)
class Observations:
    """Values for histograms since they were last collected; the oldest go when nobody collects.

    Units are in the names. Per step: iteration_tokens, schedule/execute/update_seconds;
    encode_item_seconds: (modality, seconds) of one item; the others per request.
    `residence_seconds`: from arrival at this engine to the end; `values_seconds`: until all values
    were there.
    """

    iteration_tokens: deque[float] = field(default_factory=_queue)
    queue_seconds: deque[float] = field(default_factory=_queue)
    prefill_seconds: deque[float] = field(default_factory=_queue)
    decode_seconds: deque[float] = field(default_factory=_queue)
    inference_seconds: deque[float] = field(default_factory=_queue)
    time_to_first_token_seconds: deque[float] = field(default_factory=_queue)
    inter_token_seconds: deque[float] = field(default_factory=_queue)
    residence_seconds: deque[float] = field(default_factory=_queue)
    values_seconds: deque[float] = field(default_factory=_queue)
    prompt_tokens: deque[float] = field(default_factory=_queue)
    generation_tokens: deque[float] = field(default_factory=_queue)
    preemptions: deque[float] = field(default_factory=_queue)
    schedule_seconds: deque[float] = field(default_factory=_queue)
    execute_seconds: deque[float] = field(default_factory=_queue)
    update_seconds: deque[float] = field(default_factory=_queue)
    encoder_wait_seconds: deque[float] = field(default_factory=_queue)
    encode_item_seconds: deque[tuple[int, float]] = field(
        default_factory=lambda: deque(maxlen=_PENDING)
    )


@dataclass(slots=True)
class EngineStats:
    """Counters since the engine started, and observations.

    Attributes:
        num_prompt_tokens, num_cached_prompt_tokens: of requests that got their first token.
        prefix_media_*: the part of num_prefix_* that stands for media, by modality.
        encoded_items, encoded_embeds, encode_seconds: by modality.
        num_prefill_tokens, prefill_seconds: of steps that were mostly prefill: what a computed
            token costs.
    """

    num_steps: int = 0
    num_prefix_query_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    prefix_media_query_tokens: dict[int, int] = field(default_factory=dict)
    prefix_media_hit_tokens: dict[int, int] = field(default_factory=dict)
    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    num_no_progress: int = 0
    num_empty_passes: int = 0
    encoded_items: dict[int, int] = field(default_factory=dict)
    encoded_embeds: dict[int, int] = field(default_factory=dict)
    encode_seconds: dict[int, float] = field(default_factory=dict)
    num_prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    finished: dict[str, int] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)
    observed: Observations = field(default_factory=Observations)

    def count_encoded(self, modality: int, num_embeds: int, seconds: float) -> None:
        self.encoded_items[modality] = self.encoded_items.get(modality, 0) + 1
        self.encoded_embeds[modality] = self.encoded_embeds.get(modality, 0) + num_embeds
        self.encode_seconds[modality] = self.encode_seconds.get(modality, 0.0) + seconds
        self.observed.encode_item_seconds.append((modality, seconds))

    def count_prefix_media(self, modality: int, num_tokens: int, num_found: int) -> None:
        queries, hits = self.prefix_media_query_tokens, self.prefix_media_hit_tokens
        queries[modality] = queries.get(modality, 0) + num_tokens
        hits[modality] = hits.get(modality, 0) + num_found

    def count_finished(self, reason: str) -> None:
        self.finished[reason] = self.finished.get(reason, 0) + 1

    def count_error(self, code: str) -> None:
        self.errors[code] = self.errors.get(code, 0) + 1
