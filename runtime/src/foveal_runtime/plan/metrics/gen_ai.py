"""The families of OpenTelemetry's conventions for generative AI, in Prometheus' spelling.

`gen_ai.server.time_to_first_token` in seconds is `gen_ai_server_time_to_first_token_seconds`, as
OpenTelemetry's own exporters write it; labels are the attributes likewise. The same events as
vllm.py's families, for dashboards that know these names: never add both up.
Source: semantic conventions for generative AI metrics (status: development), with its buckets.
"""

from __future__ import annotations

from functools import partial

from foveal_runtime.plan.metrics.metric import Metric, family

PROVIDER = "foveal"
_LABELS = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model",
           "gen_ai_response_model")  # fmt: skip


_histogram = partial(family("gen_ai_", _LABELS), ("frontend",), "histogram")

GEN_AI_METRICS: tuple[Metric, ...] = (
    _histogram(
        "server_request_duration_seconds",
        "gen_ai.server.request.duration: from a request's arrival to its last token; error_type "
        "is empty for those that succeeded.",
        "error_type",
        unit="seconds",
        buckets=(0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96,
                 81.92),
    ),
    _histogram(
        "server_time_to_first_token_seconds",
        "gen_ai.server.time_to_first_token: from a request's arrival to its first token, of "
        "requests that succeeded.",
        unit="seconds",
        buckets=(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0,
                 7.5, 10.0),
    ),
    _histogram(
        "server_time_per_output_token_seconds",
        "gen_ai.server.time_per_output_token: mean time per token after the first, of sequences "
        "that succeeded.",
        unit="seconds",
        buckets=(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
    ),
    _histogram(
        "client_token_usage",
        "gen_ai.client.token.usage: tokens of a request by gen_ai_token_type, input (media "
        "expanded, cached ones too) or output.",
        "gen_ai_token_type",
        unit="tokens",
        buckets=tuple(float(4**exponent) for exponent in range(14)),
    ),
)  # fmt: skip
