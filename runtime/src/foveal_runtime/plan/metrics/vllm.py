"""The families that dashboards for vLLM know: same names, types, labels and buckets, our values.

Each family has one exporter, so that a sum over processes counts nothing twice: what one request
saw comes from frontends (which outlive an engine), what an engine did comes from engines.
Frontends leave the label `engine` empty. Families without a meaning here (LoRA, KV connectors'
stages, sleep levels other than awake) are left out.
"""

from __future__ import annotations

from functools import partial

from foveal_runtime.plan.metrics.metric import (
    ITERATION_BUCKETS,
    ITL_BUCKETS,
    REQUEST_BUCKETS,
    TOKEN_BUCKETS,
    TTFT_BUCKETS,
    Metric,
    Role,
    family,
)

_M = ("model_name", "engine")
_ENGINE: tuple[Role, ...] = ("engine",)
_FRONTEND: tuple[Role, ...] = ("frontend",)
_PREEMPTION_BUCKETS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
_N_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)


_one = family("vllm:", _M)
_tokens = partial(_one, _FRONTEND, "histogram", unit="tokens", buckets=TOKEN_BUCKETS)
_seconds = partial(
    _one, _FRONTEND, "histogram", unit="seconds", buckets=REQUEST_BUCKETS, is_traced=True
)
"""Of a request, as its client sees it."""

_ENGINE_STATE = (
    _one(_ENGINE, "gauge", "num_requests_running", "Requests in the running batch."),
    _one(_ENGINE, "gauge", "num_requests_waiting", "Requests that wait for their first step."),
    _one(
        _ENGINE, "gauge", "num_requests_waiting_by_reason",
        "Waiting requests: capacity (no room in the batch or in KV memory) or deferred (an item's "
        "value is on its way).", "reason",
    ),
    _one(_ENGINE, "gauge", "kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1."),
    _one(_ENGINE, "gauge", "engine_sleep_state", "1 for the state the engine is in.",
         "sleep_state"),
    _one(
        _ENGINE, "gauge", "cache_config_info", "Always 1; the cache configuration as labels.",
        "block_size", "num_gpu_blocks", "enable_prefix_caching", "cache_dtype",
    ),
    _one(_ENGINE, "counter", "num_preemptions", "Requests preempted for want of KV blocks."),
    _one(_ENGINE, "histogram", "iteration_tokens_total", "Tokens computed in one step.",
         unit="tokens", buckets=ITERATION_BUCKETS),
)  # fmt: skip

_ENGINE_TOKENS = (
    _one(_ENGINE, "counter", "prefix_cache_queries", "Prompt tokens looked up in the prefix "
         "cache.", unit="tokens"),
    _one(_ENGINE, "counter", "prefix_cache_hits", "Prompt tokens found in the prefix cache.",
         unit="tokens"),
    _one(_ENGINE, "counter", "prompt_tokens", "Prompt tokens of requests that got their first "
         "token.", unit="tokens"),
    _one(_ENGINE, "counter", "prompt_tokens_by_source", "Prompt tokens: local_compute or "
         "local_cache_hit.", "source", unit="tokens"),
    _one(_ENGINE, "counter", "prompt_tokens_cached", "Prompt tokens that were not computed.",
         unit="tokens"),
    _one(_ENGINE, "counter", "prompt_tokens_cached_by_source", "Cached prompt tokens by tier.",
         "source", unit="tokens"),
    _one(_ENGINE, "counter", "generation_tokens", "Tokens generated.", unit="tokens"),
    _one(_ENGINE, "counter", "spec_decode_num_drafts", "Guesses of a stream's next tokens.",
         unit="drafts"),
    _one(_ENGINE, "counter", "spec_decode_num_draft_tokens", "Tokens guessed.", unit="tokens"),
    _one(_ENGINE, "counter", "spec_decode_num_accepted_tokens", "Guessed tokens that the model "
         "drew.", unit="tokens"),
    _one(_ENGINE, "histogram", "request_num_preemptions", "Preemptions of one request.",
         buckets=_PREEMPTION_BUCKETS),
)  # fmt: skip

_REQUESTS = (
    _one(_FRONTEND, "counter", "mm_cache_queries", "Media items looked up.", unit="items"),
    _one(_FRONTEND, "counter", "mm_cache_hits", "Media items that were neither processed nor "
         "sent: the engine had them.", unit="items"),
    _one(_FRONTEND, "counter", "request_success", "Finished sequences by reason (stop, length, "
         "abort, error).", "finished_reason"),
    family("vllm:", ("model_name",))(
        _FRONTEND, "counter", "admission_rejections", "Requests rejected before admission, by the "
        "limit they reached.", "reason",
    ),
    _tokens("request_prompt_tokens", "Prompt tokens of a sequence, media expanded."),
    _tokens("request_generation_tokens", "Output tokens of a sequence."),
    _tokens("request_max_num_generation_tokens", "Output tokens of the longest "
            "sequence of a request."),
    _tokens("request_params_max_tokens", "max_tokens as it applied."),
    _tokens("request_prefill_kv_computed_tokens", "Prompt tokens computed, the cached "
            "ones left out."),
    _one(_FRONTEND, "histogram", "request_params_n", "n of a request.", buckets=_N_BUCKETS),
    _seconds("time_to_first_token_seconds", "From the request's arrival to its first token.",
             buckets=TTFT_BUCKETS),
    _seconds("inter_token_latency_seconds", "Between two outputs of a sequence.",
             buckets=ITL_BUCKETS),
    _seconds("request_time_per_output_token_seconds", "Mean time per token after the first.",
             buckets=ITL_BUCKETS),
    _seconds("e2e_request_latency_seconds", "From arrival to the last token."),
    _seconds("request_queue_time_seconds", "Waiting in the engine."),
    _seconds("request_inference_time_seconds", "From the engine's first step to the last token."),
    _seconds("request_prefill_time_seconds", "From the engine's first step to the first token."),
    _seconds("request_decode_time_seconds", "From the first token to the last."),
)  # fmt: skip

_HTTP = (
    family("http_", ("handler", "method", "status"))(
        _FRONTEND, "counter", "requests", "HTTP requests by path template and status class.",
    ),
    family("http_", ("handler", "method"))(
        _FRONTEND, "histogram", "request_duration_seconds", "HTTP requests, from the head to the "
        "last byte of the answer.", unit="seconds", buckets=TTFT_BUCKETS, is_traced=True,
    ),
)  # fmt: skip

VLLM_METRICS: tuple[Metric, ...] = (*_ENGINE_STATE, *_ENGINE_TOKENS, *_REQUESTS, *_HTTP)
