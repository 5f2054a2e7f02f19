"""What an engine counts about itself: plain numbers, no client library.

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

    Units are in the names; `iteration_tokens` is per step, the others per request.
    """

    iteration_tokens: deque[float] = field(default_factory=_queue)
    queue_seconds: deque[float] = field(default_factory=_queue)
    prefill_seconds: deque[float] = field(default_factory=_queue)
    decode_seconds: deque[float] = field(default_factory=_queue)
    inference_seconds: deque[float] = field(default_factory=_queue)
    time_to_first_token_seconds: deque[float] = field(default_factory=_queue)
    inter_token_seconds: deque[float] = field(default_factory=_queue)
    request_seconds: deque[float] = field(default_factory=_queue)
    prompt_tokens: deque[float] = field(default_factory=_queue)
    generation_tokens: deque[float] = field(default_factory=_queue)
    prefill_computed_tokens: deque[float] = field(default_factory=_queue)
    max_tokens: deque[float] = field(default_factory=_queue)
    preemptions: deque[float] = field(default_factory=_queue)
    schedule_seconds: deque[float] = field(default_factory=_queue)
    execute_seconds: deque[float] = field(default_factory=_queue)
    update_seconds: deque[float] = field(default_factory=_queue)
    encode_seconds: deque[float] = field(default_factory=_queue)


@dataclass(slots=True)
class EngineStats:
    """Counters (num_*, *_seconds) since the engine started, and observations."""

    num_steps: int = 0
    num_prefix_query_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    num_mm_queries: int = 0
    num_mm_hits: int = 0
    num_encoded_items: int = 0
    num_encoded_embeds: int = 0
    num_no_progress: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)
    observed: Observations = field(default_factory=Observations)

    def count_finished(self, reason: str) -> None:
        self.finished[reason] = self.finished.get(reason, 0) + 1

    def count_error(self, code: str) -> None:
        self.errors[code] = self.errors.get(code, 0) + 1
