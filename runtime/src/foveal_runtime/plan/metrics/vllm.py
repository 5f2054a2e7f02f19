"""The families that dashboards for vLLM know: same names, types, labels and buckets, our values.

Each family has one exporter, so that a sum over processes counts nothing twice: what one request
saw comes from frontends (which outlive an engine), what an engine did comes from engines.
Frontends leave the label `engine` empty. Families without a meaning here (LoRA, KV connectors'
stages, sleep levels other than awake) are left out.
"""

from __future__ import annotations

from foveal_runtime.plan.metrics.metric import (
    ITERATION_BUCKETS,
    ITL_BUCKETS,
    REQUEST_BUCKETS,
    TOKEN_BUCKETS,
    TTFT_BUCKETS,
    Kind,
    Metric,
    Role,
)

_M = ("model_name", "engine")
_PREEMPTION_BUCKETS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
_N_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)


def _one(
    role: Role,
    kind: Kind,
    name: str,
    help_text: str,
    *more: str,
    unit: str = "",
    buckets: tuple[float, ...] = (),
    labels: tuple[str, ...] = _M,
    is_traced: bool = False,
) -> Metric:
    return Metric(
        name=f"vllm:{name}",
        kind=kind,
        help=help_text,
        roles=(role,),
        labels=(*labels, *more),
        unit=unit,
        buckets=buckets,
        is_traced=is_traced,
    )


def _tokens(role: Role, name: str, help_text: str) -> Metric:
    return _one(role, "histogram", name, help_text, unit="tokens", buckets=TOKEN_BUCKETS)


def _seconds(name: str, help_text: str, buckets: tuple[float, ...] = REQUEST_BUCKETS) -> Metric:
    """A time of a request, as its client sees it."""
    return _one(
        "frontend", "histogram", name, help_text, unit="seconds", buckets=buckets, is_traced=True
    )


_ENGINE_STATE = (
    _one("engine", "gauge", "num_requests_running", "Requests in the running batch."),
    _one("engine", "gauge", "num_requests_waiting", "Requests that wait for their first step."),
    _one(
        "engine", "gauge", "num_requests_waiting_by_reason",
        "Waiting requests: capacity (no room in the batch or in KV memory) or deferred (an item's "
        "value is on its way).", "reason",
    ),
    _one("engine", "gauge", "kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1."),
    _one("engine", "gauge", "engine_sleep_state", "1 for the state the engine is in.",
         "sleep_state"),
    _one(
        "engine", "gauge", "cache_config_info", "Always 1; the cache configuration as labels.",
        "block_size", "num_gpu_blocks", "enable_prefix_caching", "cache_dtype",
    ),
    _one("engine", "counter", "num_preemptions", "Requests preempted for want of KV blocks."),
    _one("engine", "histogram", "iteration_tokens_total", "Tokens computed in one step.",
         unit="tokens", buckets=ITERATION_BUCKETS),
)  # fmt: skip

_ENGINE_TOKENS = (
    _one("engine", "counter", "prefix_cache_queries", "Prompt tokens looked up in the prefix "
         "cache.", unit="tokens"),
    _one("engine", "counter", "prefix_cache_hits", "Prompt tokens found in the prefix cache.",
         unit="tokens"),
    _one("engine", "counter", "prompt_tokens", "Prompt tokens of requests that got their first "
         "token.", unit="tokens"),
    _one("engine", "counter", "prompt_tokens_by_source", "Prompt tokens: local_compute or "
         "local_cache_hit.", "source", unit="tokens"),
    _one("engine", "counter", "prompt_tokens_cached", "Prompt tokens that were not computed.",
         unit="tokens"),
    _one("engine", "counter", "prompt_tokens_cached_by_source", "Cached prompt tokens by tier.",
         "source", unit="tokens"),
    _one("engine", "counter", "generation_tokens", "Tokens generated.", unit="tokens"),
    _one("engine", "histogram", "request_num_preemptions", "Preemptions of one request.",
         buckets=_PREEMPTION_BUCKETS),
)  # fmt: skip

_REQUESTS = (
    _one("frontend", "counter", "mm_cache_queries", "Media items looked up.", unit="items"),
    _one("frontend", "counter", "mm_cache_hits", "Media items that were neither processed nor "
         "sent: the engine had them.", unit="items"),
    _one("frontend", "counter", "request_success", "Finished sequences by reason (stop, length, "
         "abort, error).", "finished_reason"),
    _one("frontend", "counter", "admission_rejections", "Requests rejected before admission, "
         "by the limit they reached.", "reason", labels=("model_name",)),
    _tokens("frontend", "request_prompt_tokens", "Prompt tokens of a sequence, media expanded."),
    _tokens("frontend", "request_generation_tokens", "Output tokens of a sequence."),
    _tokens("frontend", "request_max_num_generation_tokens", "Output tokens of the longest "
            "sequence of a request."),
    _tokens("frontend", "request_params_max_tokens", "max_tokens as it applied."),
    _tokens("frontend", "request_prefill_kv_computed_tokens", "Prompt tokens computed, the cached "
            "ones left out."),
    _one("frontend", "histogram", "request_params_n", "n of a request.", buckets=_N_BUCKETS),
    _seconds("time_to_first_token_seconds", "From the request's arrival to its first token.",
             TTFT_BUCKETS),
    _seconds("inter_token_latency_seconds", "Between two outputs of a sequence.", ITL_BUCKETS),
    _seconds("request_time_per_output_token_seconds", "Mean time per token after the first.",
             ITL_BUCKETS),
    _seconds("e2e_request_latency_seconds", "From arrival to the last token."),
    _seconds("request_queue_time_seconds", "Waiting in the engine."),
    _seconds("request_inference_time_seconds", "From the engine's first step to the last token."),
    _seconds("request_prefill_time_seconds", "From the engine's first step to the first token."),
    _seconds("request_decode_time_seconds", "From the first token to the last."),
)  # fmt: skip

_HTTP = (
    Metric(
        name="http_requests",
        kind="counter",
        help="HTTP requests by path template and status class.",
        roles=("frontend",),
        labels=("handler", "method", "status"),
    ),
    Metric(
        name="http_request_duration_seconds",
        kind="histogram",
        help="HTTP requests, from the head to the last byte of the answer.",
        roles=("frontend",),
        labels=("handler", "method"),
        unit="seconds",
        buckets=TTFT_BUCKETS,
        is_traced=True,
    ),
)

VLLM_METRICS: tuple[Metric, ...] = (*_ENGINE_STATE, *_ENGINE_TOKENS, *_REQUESTS, *_HTTP)
