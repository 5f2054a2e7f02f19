"""Request metrics as a client sees them: times and tokens of its sequences.

Fed by service.py with every delta. Frontends own these families because a request outlives an
engine. Keeps a few numbers per sequence; no text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from foveal_runtime.frontend.engines.sequence import Delta
from foveal_runtime.frontend.http.access.admission import Gate
from foveal_runtime.frontend.http.monitoring.health import Health
from foveal_runtime.frontend.items.interfaces import Generator
from foveal_runtime.plan.metrics.gen_ai import PROVIDER
from foveal_runtime.plan.sampling import SamplingParams
from foveal_runtime.telemetry.metrics import Metrics
from foveal_runtime.telemetry.tracing import Span
from foveal_runtime.wire.messages import FirstOutput

FINISH_REASONS = ("stop", "length", "abort", "error")


@dataclass(slots=True)
class _Sequence:
    first_at: float = 0.0
    last_at: float = 0.0
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    num_tokens: int = 0
    num_prompt: int = 0
    num_cached: int = 0
    finish_reason: str = ""
    said_reason: str = ""
    is_embedding: bool = False
    media: str = "text"


def _media(first: FirstOutput) -> str:
    """text; hit: every item's value was in the engine; miss: some had to be sent or made."""
    if not first.num_mm_items:
        return "text"
    return "hit" if first.num_mm_hits == first.num_mm_items else "miss"


class RequestStats:
    """One HTTP request. `started` is its arrival on `clock`; `operation` as OpenTelemetry names it:
    chat, text_completion or embeddings; `trace_id` is "" where it is not traced."""

    def __init__(
        self,
        metrics: Metrics,
        *,
        started: float,
        num_sequences: int,
        num_choices: int,
        max_tokens: Sequence[int],
        trace_id: str = "",
        operation: str = "chat",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics = metrics
        self._clock = clock
        self._started = started
        self._trace_id = trace_id
        self._operation = operation
        self._num_choices = num_choices
        self._routable = False
        self._sequences = [_Sequence() for _ in range(num_sequences)]
        metrics.observe("vllm:request_params_n", num_choices)
        for limit in max_tokens:
            metrics.observe("vllm:request_params_max_tokens", limit)

    def prepared(self) -> None:
        """Media are known and the request can be routed."""
        self._routable = True
        self._observe("foveal_request_media_seconds", self._clock() - self._started)

    def add(self, index: int, delta: Delta) -> None:
        now = self._clock()
        sequence = self._sequences[index]
        if delta.first is not None:
            sequence.num_prompt = delta.first.num_prompt_tokens
            sequence.num_cached = delta.first.num_cached_tokens
            sequence.queue_seconds = delta.first.queue_seconds
            sequence.prefill_seconds = delta.first.prefill_seconds
            sequence.media = _media(delta.first)
        if delta.num_tokens:
            if not sequence.num_tokens:
                sequence.first_at = now
                waited = now - self._started
                self._observe("vllm:time_to_first_token_seconds", waited)
                self._observe("foveal_first_token_seconds", waited, media=sequence.media)
            else:
                self._observe("vllm:inter_token_latency_seconds", now - sequence.last_at)
            sequence.num_tokens += delta.num_tokens
            sequence.last_at = now
        if delta.embedding:
            sequence.is_embedding = True
            sequence.first_at = sequence.last_at = now
        if delta.finish_reason:
            # For engines and their dashboards, calls of tools are answers as any.
            reason = delta.finish_reason
            sequence.said_reason = reason
            sequence.finish_reason = "stop" if reason == "tool_calls" else reason

    def end(self, *, error: str) -> None:
        """Every sequence counts once; those that did not finish were aborted or failed. A request
        that was refused before it could be routed had none. `error`: the kind of what ended it."""
        self._end_gen_ai(error)
        if not self._routable:
            return
        unfinished = "error" if error else "abort"
        for sequence in self._sequences:
            reason = sequence.finish_reason or unfinished
            self._metrics.inc("vllm:request_success", finished_reason=reason)
            if sequence.finish_reason and (sequence.num_tokens or sequence.is_embedding):
                self._finished(sequence)
        longest = max(sequence.num_tokens for sequence in self._sequences)
        if longest:
            self._metrics.observe("vllm:request_max_num_generation_tokens", longest)

    def _observe(self, name: str, seconds: float, **labels: str) -> None:
        self._metrics.observe(name, seconds, trace_id=self._trace_id, **labels)

    @property
    def num_input_tokens(self) -> int:
        """Of all prompts; the choices of one share it."""
        return sum(sequence.num_prompt for sequence in self._sequences[:: self._num_choices])

    @property
    def num_output_tokens(self) -> int:
        return sum(sequence.num_tokens for sequence in self._sequences)

    def describe_request(self, span: Span, model: str, sampling: SamplingParams) -> None:
        """What is asked, by OpenTelemetry's names for generative AI."""
        span.set("gen_ai.operation.name", self._operation)
        span.set("gen_ai.provider.name", PROVIDER)
        span.set("gen_ai.request.model", model)
        span.set("gen_ai.response.model", model)
        span.set("gen_ai.request.max_tokens", sampling.max_tokens)
        span.set("gen_ai.request.temperature", sampling.temperature)
        span.set("gen_ai.request.top_p", sampling.top_p)
        if self._num_choices != 1:
            span.set("gen_ai.request.choice.count", self._num_choices)

    def describe_answer(self, span: Span, error: str) -> None:
        """What is known at the end, by OpenTelemetry's names."""
        cached = sum(sequence.num_cached for sequence in self._sequences[:: self._num_choices])
        span.set("gen_ai.usage.input_tokens", self.num_input_tokens)
        span.set("gen_ai.usage.cache_read.input_tokens", cached)
        span.set("gen_ai.usage.output_tokens", self.num_output_tokens)
        reasons = [sequence.said_reason or "error" for sequence in self._sequences]
        span.set("gen_ai.response.finish_reasons", reasons)
        if kind := self._error_type(error):
            span.set("error.type", kind)

    def _error_type(self, error: str) -> str:
        is_whole = all(sequence.finish_reason for sequence in self._sequences)
        return error or ("" if is_whole else "aborted")

    def _end_gen_ai(self, error: str) -> None:
        kind = self._error_type(error)
        observe, operation = self._metrics.observe, {"gen_ai_operation_name": self._operation}
        last = max(sequence.last_at for sequence in self._sequences)
        seconds = (self._clock() if kind or not last else last) - self._started
        observe("gen_ai_server_request_duration_seconds", seconds, error_type=kind, **operation)
        for token_type, count in (
            ("input", self.num_input_tokens),
            ("output", self.num_output_tokens),
        ):
            if count:
                observe("gen_ai_client_token_usage", count, gen_ai_token_type=token_type,
                        **operation)  # fmt: skip
        told = [sequence for sequence in self._sequences if sequence.num_tokens]
        if kind or not told:
            return
        first = min(sequence.first_at for sequence in told)
        observe("gen_ai_server_time_to_first_token_seconds", first - self._started, **operation)
        for sequence in told:
            if sequence.num_tokens > 1:
                each = (sequence.last_at - sequence.first_at) / (sequence.num_tokens - 1)
                observe("gen_ai_server_time_per_output_token_seconds", each, **operation)

    def _finished(self, sequence: _Sequence) -> None:
        count, observe = self._metrics.observe, self._observe
        decode = sequence.last_at - sequence.first_at
        count("vllm:request_prompt_tokens", sequence.num_prompt)
        count("vllm:request_prefill_kv_computed_tokens", sequence.num_prompt - sequence.num_cached)
        observe("vllm:e2e_request_latency_seconds", sequence.last_at - self._started)
        observe("vllm:request_queue_time_seconds", sequence.queue_seconds)
        observe("vllm:request_prefill_time_seconds", sequence.prefill_seconds)
        if not sequence.is_embedding:
            count("vllm:request_generation_tokens", sequence.num_tokens)
            observe("vllm:request_decode_time_seconds", decode)
        observe("vllm:request_inference_time_seconds", sequence.prefill_seconds + decode)
        if sequence.num_tokens > 1:
            observe(
                "vllm:request_time_per_output_token_seconds", decode / (sequence.num_tokens - 1)
            )


def door_source(gate: Gate, health: Health, generator: Generator) -> Callable[[Metrics], None]:
    """Copies the admission gate's counters and the engines' load when somebody scrapes."""

    def copy(metrics: Metrics) -> None:
        metrics.set("foveal_requests_inflight", gate.num_requests)
        metrics.set("foveal_prompt_tokens_inflight", gate.num_tokens)
        metrics.set("foveal_media_inflight_bytes", gate.media_bytes)
        metrics.set("foveal_draining", float(gate.draining))
        metrics.set("foveal_ready", float(health.ready()[0]))
        metrics.set("foveal_engines_ready", generator.num_ready_engines())
        load = generator.load()
        metrics.set("foveal_engines_requests_waiting", load.num_waiting)
        metrics.set("foveal_engines_kv_cache_usage", load.kv_usage)
        for reason, count in gate.rejections.items():
            metrics.set("vllm:admission_rejections", count, reason=reason)

    return copy


def begin_at_zero(metrics: Metrics) -> None:
    """Label values that are known before they happen."""
    for reason in FINISH_REASONS:
        metrics.inc("vllm:request_success", 0, finished_reason=reason)
