"""Counters of an engine: plain numbers, no client library.

Written by `scheduler` and `core`, read by `metrics`, which maps them to the declared series.
Counters only grow; observations are counted at once, so that nothing piles up where nobody scrapes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from foveal_runtime.plan.metrics import by_name
from foveal_runtime.telemetry.histogram import Histogram


def _of(name: str) -> Callable[[], Histogram]:
    return lambda: Histogram(by_name(name).buckets)


@dataclass(slots=True)
class Observations:
    """Histograms with the buckets of the series they become.

    Units are in the names. Per step: iteration_tokens, schedule/execute/update_seconds;
    encode_item_seconds: of one item, by modality; the others per request.
    `residence_seconds`: from arrival at this engine to the end; `values_seconds`: until all values
    were there.
    """

    iteration_tokens: Histogram = field(default_factory=_of("vllm:iteration_tokens_total"))
    residence_seconds: Histogram = field(default_factory=_of("foveal_engine_residence_seconds"))
    values_seconds: Histogram = field(default_factory=_of("foveal_mirror_waitq_seconds"))
    preemptions: Histogram = field(default_factory=_of("vllm:request_num_preemptions"))
    schedule_seconds: Histogram = field(default_factory=_of("foveal_engine_step_seconds"))
    execute_seconds: Histogram = field(default_factory=_of("foveal_engine_step_seconds"))
    update_seconds: Histogram = field(default_factory=_of("foveal_engine_step_seconds"))
    encoder_wait_seconds: Histogram = field(default_factory=_of("foveal_encoder_wait_seconds"))
    encode_item_seconds: dict[int, Histogram] = field(default_factory=dict)


@dataclass(slots=True)
class EngineStats:
    """Counters since the engine started, and observations.

    Attributes:
        num_prompt_tokens, num_cached_prompt_tokens: of requests that got their first token.
        num_stateless_tokens: prompt tokens whose KV was cached, but no recurrent state, or not all
            of a sliding window, that they could be continued from.
        prefix_media_*: the part of num_prefix_* that stands for media, by modality.
        num_drafts, num_draft_tokens, num_accepted_tokens: guesses of a stream's next tokens, their
            tokens, and those of them that the model drew.
        encoded_items, encoded_embeds, encode_seconds: by modality.
        num_prefill_tokens, prefill_seconds: of steps that were mostly prefill: what a computed
            token costs.
    """

    num_steps: int = 0
    num_prefix_query_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_stateless_tokens: int = 0
    prefix_media_query_tokens: Counter[int] = field(default_factory=Counter)
    prefix_media_hit_tokens: Counter[int] = field(default_factory=Counter)
    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_preemptions: int = 0
    num_no_progress: int = 0
    num_empty_passes: int = 0
    encoded_items: Counter[int] = field(default_factory=Counter)
    encoded_embeds: Counter[int] = field(default_factory=Counter)
    encode_seconds: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    num_prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    finished: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    observed: Observations = field(default_factory=Observations)

    def count_encoded(self, modality: int, num_embeds: int, seconds: float) -> None:
        self.encoded_items[modality] += 1
        self.encoded_embeds[modality] += num_embeds
        self.encode_seconds[modality] += seconds
        found = self.observed.encode_item_seconds
        found.setdefault(modality, _of("foveal_media_stage_seconds")()).observe(seconds)
