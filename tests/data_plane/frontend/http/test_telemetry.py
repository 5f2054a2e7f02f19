"""Metrics that parse and add up, one-line logs, spans over the stages."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from foveal_runtime.plan import errors
from foveal_runtime.plan.errors import EngineFailure
from foveal_runtime.plan.metrics import METRICS
from foveal_runtime.telemetry.exposition import merge, parse
from foveal_runtime.telemetry.logs import JsonFormatter, TextFormatter, request_id_of_task
from foveal_runtime.telemetry.metrics import Metrics
from foveal_runtime.telemetry.tracing import NO_SPAN, Tracing, child_span, configure_tracing
from tests.support.metric_samples import filled, total, values
from tests.support.metrics_page import markdown


async def test_requests_are_counted_once(harness: Any) -> None:
    await harness.chat("hi", n=2)
    await harness.stream(**harness.body("hi"))
    harness.generator.error, harness.generator.error_after = EngineFailure("gone"), 2
    await harness.stream(**harness.body("hi"))
    await harness.chat(top_p=5)
    await harness.http.get("/nowhere/at/all")
    text = (await harness.http.get("/metrics")).text
    tokens = len("Hello, world!") + 1
    assert total(text, "vllm:request_success_total", finished_reason="stop") == 3
    assert total(text, "vllm:request_success_total", finished_reason="error") == 1
    assert total(text, "vllm:request_success_total", finished_reason="abort") == 0
    assert total(text, "vllm:request_generation_tokens_sum") == 3 * tokens
    assert total(text, "vllm:time_to_first_token_seconds_count") == 4
    assert total(text, "vllm:inter_token_latency_seconds_count") == 3 * (tokens - 1) + 1
    assert total(text, "vllm:request_queue_time_seconds_sum") == pytest.approx(0.003)
    assert total(text, "vllm:request_params_n_bucket", le="1.0") == 2
    chat = {"gen_ai_operation_name": "chat", "gen_ai_request_model": "tiny",
            "gen_ai_response_model": "tiny", "gen_ai_provider_name": "foveal"}  # fmt: skip
    duration = "gen_ai_server_request_duration_seconds_count"
    assert total(text, duration, error_type="", **chat) == 2, "requests, not their choices"
    assert total(text, duration, error_type="EngineFailure", **chat) == 1
    assert total(text, "gen_ai_server_time_to_first_token_seconds_count", **chat) == 2
    assert total(text, "gen_ai_server_time_per_output_token_seconds_count", **chat) == 3
    usage = "gen_ai_client_token_usage_sum"
    assert total(text, usage, gen_ai_token_type="output", **chat) == 3 * tokens + 2
    prompts = total(text, "vllm:request_prompt_tokens_sum")  # of three sequences that ended
    assert total(text, usage, gen_ai_token_type="input", **chat) == prompts
    assert total(text, "foveal_request_errors_total", code="engine_error") == 1
    assert total(text, "foveal_request_errors_total", code="invalid_request_error") == 1
    assert total(text, "http_requests_total", handler="unmatched", status="4xx") == 1
    assert total(text, "foveal_ready", process="frontend-0") == 1
    assert total(text, "foveal_requests_inflight") == 0
    assert total(text, "process_resident_memory_bytes", process="frontend-0") > 0


def test_declarations() -> None:
    """Names are unique and sane; every series can be made and read back."""
    for metric in METRICS:
        assert metric.help.endswith("."), metric.name
        assert metric.roles
        assert (metric.kind == "histogram") == bool(metric.buckets), metric.name
        assert list(metric.buckets) == sorted(metric.buckets)
        if metric.kind == "counter":
            assert not metric.name.endswith("_total"), metric.name
    pages = {}
    for role in ("frontend", "engine"):
        pages[role] = text = filled(role).exposition().decode()
        names = {family.name for family in text_string_to_metric_families(text)}
        assert names >= {metric.name for metric in METRICS if role in metric.roles}
    assert total(pages["frontend"], "vllm:request_prompt_tokens_bucket", le="2000.0") == 1
    assert 'request_prompt_tokens_bucket{engine="",le="5000.0"' not in pages["frontend"]
    assert total(pages["engine"], "vllm:request_num_preemptions_count", engine="e") == 1


def test_wrong_use_is_a_bug() -> None:
    metrics = Metrics("frontend", model_name="m", process="p")
    with pytest.raises(KeyError):
        metrics.inc("foveal_nothing")
    with pytest.raises(KeyError):  # an engine's family
        metrics.set("vllm:num_requests_running", 1)
    with pytest.raises(AssertionError, match="labels"):
        metrics.inc("foveal_request_errors", colour="red")
    with pytest.raises(AssertionError, match="histogram"):
        metrics.set("vllm:time_to_first_token_seconds", 1)


def test_merge_adds_counters_and_keeps_processes_apart() -> None:
    pages = []
    for process, count in (("frontend-0/0", 2), ("frontend-0/1", 3)):
        metrics = Metrics("frontend", model_name="m", process=process)
        metrics.inc("vllm:request_success", count, finished_reason="stop")
        metrics.observe("vllm:time_to_first_token_seconds", 0.03)
        metrics.set("foveal_requests_inflight", count)
        pages.append(parse(metrics.exposition().decode()))
    engine = Metrics("engine", model_name="m", process="engine-0", engine="engine-0")
    engine.set("vllm:num_requests_running", 4)
    pages.append(parse(engine.exposition().decode()))
    text = merge(pages).decode()
    assert total(text, "vllm:request_success_total") == 5
    assert total(text, "vllm:time_to_first_token_seconds_bucket", le="0.04") == 2
    assert total(text, "foveal_requests_inflight", process="frontend-0/1") == 3
    assert total(text, "vllm:num_requests_running", engine="engine-0") == 4
    lines = text.splitlines()
    heads = [line for line in lines if line.startswith("# TYPE")]
    assert len(heads) == len(set(heads))


def test_what_can_happen_begins_at_zero() -> None:
    """Otherwise the first failure is no increase, and no alert or graph shows it."""
    text = Metrics("frontend", model_name="m", process="p").exposition().decode()
    told = [kind.code for kind in vars(errors).values() if hasattr(kind, "code")]
    for family, label, wanted in (
        ("foveal_request_errors_total", "code", {*told} - {"startup_error"}),
        ("foveal_request_resubmissions_total", "reason", {"disconnected", "silent"}),
    ):
        names = (dict(labels) for name, labels in values(text) if name == family)
        assert {labels[label] for labels in names} >= wanted


async def test_what_is_refused_early_counts_for_its_path(start: Any) -> None:
    async with start() as harness:
        harness.app.gate.draining = True
        assert (await harness.chat()).status_code == 503
        await harness.http.post("/v1/evil", content=b"{}")
        text = (await harness.http.get("/metrics")).text
        harness.app.gate.draining = False
    name = "http_requests_total"
    assert total(text, name, handler="/v1/chat/completions", status="5xx") == 1
    assert total(text, name, handler="unmatched", status="5xx") == 0
    assert total(text, name, handler="unmatched", status="4xx") == 1


def record(message: str, fields: dict[str, Any] | None = None) -> logging.LogRecord:
    made = logging.LogRecord("foveal_runtime.frontend", 20, "f", 1, message, (), None)
    if fields is not None:
        made.fields = fields
    return made


def test_fields_may_stand_in_extra() -> None:
    made = logging.makeLogRecord(
        {"msg": "ready", "endpoint": "tcp://x", "levelname": "INFO", "name": "x"}
    )
    assert json.loads(JsonFormatter().format(made))["endpoint"] == "tcp://x"
    assert TextFormatter().format(made).endswith("ready endpoint=tcp://x")


def test_log_lines() -> None:
    token = request_id_of_task.set("req-1")
    try:
        line = JsonFormatter("frontend-0").format(record("a\nb", {"status": 200, "path": "/x y"}))
        text = TextFormatter().format(record("a\nb", {"status": 200, "path": "/x y"}))
    finally:
        request_id_of_task.reset(token)
    assert "\n" not in line + text
    parsed = json.loads(line)
    assert (parsed["message"], parsed["status"], parsed["request_id"]) == ("a\nb", 200, "req-1")
    assert 'path="/x y"' in text
    assert "request_id=req-1" in text


@pytest.mark.parametrize("formatter", [JsonFormatter("p"), TextFormatter()])
def test_names_that_are_not_utf8_make_a_line(formatter: logging.Formatter) -> None:
    """logging printed a traceback in place of the line."""
    line = formatter.format(record("found", {"file": "a\udcff b"}))
    assert line.count("a\\udcff b") == 1
    assert "\n" not in line


async def test_request_line_has_the_id_and_no_text(harness: Any) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("foveal_runtime")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        await harness.http.post(
            "/v1/chat/completions", json=harness.body("secret"), headers={"x-request-id": "mine"}
        )
        await harness.http.get("/livez")
        await harness.until(lambda: stream.getvalue())
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["request_id"] for line in lines] == ["mine"]
    assert lines[0]["status"] == 200
    assert "secret" not in stream.getvalue()


async def test_spans_continue_the_callers_trace(start: Any) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing = Tracing(provider.get_tracer("test"))
    async with start(tracing=tracing) as harness:
        trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
        headers = {"traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"}
        for stream in (False, True):
            await harness.http.post(
                "/v1/chat/completions", json=harness.body(stream=stream), headers=headers
            )
        await harness.until(lambda: len(exporter.get_finished_spans()) == 6)
    spans = exporter.get_finished_spans()
    assert {f"{span.context.trace_id:032x}" for span in spans} == {trace_id}
    names = sorted(span.name for span in spans)
    assert names == ["POST /v1/chat/completions"] * 2 + ["generate"] * 2 + ["prepare"] * 2
    generate = next(span for span in spans if span.name == "generate")
    assert [event.name for event in generate.events] == ["first_token"]
    assert generate.attributes is not None
    num_output = len("Hello, world!") + 1
    assert generate.attributes["num_output_tokens"] == num_output
    for span in spans:
        if span.name.startswith("POST"):
            asked = dict(span.attributes or {})
            assert asked.pop("gen_ai.usage.input_tokens") > 0
            assert {k: v for k, v in asked.items() if "gen_ai" in k or k == "error.type"} == {
                "gen_ai.operation.name": "chat",
                "gen_ai.provider.name": "foveal",
                "gen_ai.request.model": "tiny",
                "gen_ai.response.model": "tiny",
                "gen_ai.request.max_tokens": asked["gen_ai.request.max_tokens"],
                "gen_ai.request.temperature": 1.0,
                "gen_ai.request.top_p": 1.0,
                "gen_ai.usage.cache_read.input_tokens": 0,
                "gen_ai.usage.output_tokens": num_output,
                "gen_ai.response.finish_reasons": ("stop",),
            }
    provider.shutdown()


async def test_a_servers_span_tells_its_own_failures(start: Any) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with start(tracing=Tracing(provider.get_tracer("test"))) as harness:
        await harness.chat(top_p=5)
        harness.generator.error = EngineFailure("gone")
        await harness.chat()
        await harness.until(lambda: sum(_is_root(s) for s in exporter.get_finished_spans()) == 2)
    refused, failed = (span for span in exporter.get_finished_spans() if _is_root(span))
    assert refused.attributes is not None
    assert refused.attributes["http.response.status_code"] == 400
    assert refused.attributes["http.request.method"] == "POST"
    assert refused.attributes["url.path"] == "/v1/chat/completions"
    assert (refused.status.is_unset, failed.status.is_ok) == (True, False)
    assert failed.status.description == "engine_error"
    provider.shutdown()


def _is_root(span: ReadableSpan) -> bool:
    return span.name.startswith("POST")


def test_tracing_is_off_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    tracing = configure_tracing("foveal", "p")
    assert not tracing.is_on
    assert tracing.start("x", {}) is NO_SPAN
    with child_span("stage", size=3) as span:
        assert span is NO_SPAN


def test_the_committed_table_is_current() -> None:
    committed = Path(__file__).resolve().parents[4] / "docs" / "reference" / "metrics.md"
    assert committed.read_text(encoding="utf-8") == markdown(), (
        "run: python -m tests.support.metrics_page docs/reference/metrics.md"
    )
