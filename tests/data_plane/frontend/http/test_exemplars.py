"""Exemplars: from a bucket of a latency histogram to the trace of a request that it counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text
from prometheus_client.samples import Sample

from foveal_runtime.plan.metrics import METRICS
from foveal_runtime.telemetry.exposition import OPENMETRICS, TEXT, accepted_format
from foveal_runtime.telemetry.metrics import Metrics
from foveal_runtime.telemetry.tracing import Tracing
from tests.support.metric_samples import filled

# What Prometheus 3 sends.
PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
LATENCIES = {"vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds",
             "vllm:e2e_request_latency_seconds", "foveal_first_token_seconds",
             "http_request_duration_seconds"}  # fmt: skip


@pytest.fixture
def traced() -> Iterator[tuple[Tracing, InMemorySpanExporter]]:
    """A tracer that samples what its caller sampled, and nothing else."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=ParentBased(TraceIdRatioBased(0.0)))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield Tracing(provider.get_tracer("test")), exporter
    provider.shutdown()


def parent(trace_id: str) -> dict[str, str]:
    return {"traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"}


def exemplars(text: str) -> dict[str, list[Sample]]:
    """By family, the samples that have one."""
    return {
        family.name: found
        for family in read_openmetrics(text)
        if (found := [sample for sample in family.samples if sample.exemplar])
    }


async def openmetrics_page(harness: Any) -> str:
    answer = await harness.http.get("/metrics", headers={"accept": PROMETHEUS})
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert answer.text.endswith("# EOF\n")
    return str(answer.text)


async def test_a_bucket_names_the_trace_of_a_request_that_it_counted(
    start: Any, traced: tuple[Tracing, InMemorySpanExporter]
) -> None:
    tracing, exporter = traced
    sampled, untraced = "4bf92f3577b34da6a3ce929d0e0e4736", "0" * 31 + "1"
    async with start(tracing=tracing) as harness:
        body = harness.body(stream=False)
        for headers in (parent(sampled), {"traceparent": f"00-{untraced}-00f067aa0ba902b7-00"}, {}):
            answer = await harness.http.post("/v1/chat/completions", json=body, headers=headers)
            assert answer.status_code == 200
        await harness.until(lambda: len(exporter.get_finished_spans()) == 3)
        found = exemplars(await openmetrics_page(harness))
        plain = await harness.http.get("/metrics")
    declared = {metric.name for metric in METRICS if metric.is_traced}
    assert found.keys() >= LATENCIES
    assert found.keys() <= declared
    spans = {f"{span.context.trace_id:032x}" for span in exporter.get_finished_spans()}
    assert spans == {sampled}
    for name, samples in found.items():
        below = 0.0
        for sample in samples:
            assert sample.exemplar is not None
            assert sample.exemplar.labels == {"trace_id": sampled}, name
            assert below < sample.exemplar.value <= float(sample.labels["le"]), name
            assert sample.exemplar.timestamp is not None
            below = sample.exemplar.value
    # Three requests were counted, one of them is shown.
    [first] = found["vllm:time_to_first_token_seconds"]
    assert first.value <= 3
    assert plain.headers["content-type"] == TEXT.content_type
    assert "trace_id" not in plain.text


async def test_exemplars_of_the_processes_behind_a_port_are_merged(
    start: Any, traced: tuple[Tracing, InMemorySpanExporter]
) -> None:
    tracing, _ = traced
    first, second = "a" * 32, "b" * 32
    async with start(tracing=tracing, frontend_id="other") as other:
        peers = (f"{other.url}/metrics?own=1",)
        async with start(tracing=tracing, metrics_peers=peers) as harness:
            for each, trace_id in ((other, first), (harness, second)):
                await each.http.post(
                    "/v1/chat/completions", json=each.body(), headers=parent(trace_id)
                )
            text = await openmetrics_page(harness)
            plain = (await harness.http.get("/metrics")).text
    shown = {
        sample.exemplar.labels["trace_id"]
        for sample in exemplars(text)["vllm:time_to_first_token_seconds"]
        if sample.exemplar
    }
    assert second in shown
    assert shown <= {first, second}
    assert "trace_id" not in plain
    counts = {
        sample.name: sample.value
        for family in read_openmetrics(text)
        for sample in family.samples
        if sample.name == "vllm:time_to_first_token_seconds_count"
    }
    assert counts == {"vllm:time_to_first_token_seconds_count": 2.0}


def test_a_series_keeps_one_exemplar_a_bucket_and_the_newest() -> None:
    metrics = Metrics("frontend", model_name="m", process="p")
    for number in range(5000):
        metrics.observe(
            "vllm:inter_token_latency_seconds", (number % 40) / 10, trace_id=f"{number:032x}"
        )
    found = exemplars(metrics.exposition(OPENMETRICS).decode())
    samples = found["vllm:inter_token_latency_seconds"]
    assert len(samples) == len({sample.labels["le"] for sample in samples}) < 20
    newest = {int(sample.exemplar.labels["trace_id"], 16) for sample in samples if sample.exemplar}
    assert min(newest) >= 4960


def test_only_declared_families_take_a_trace() -> None:
    metrics = Metrics("frontend", model_name="m", process="p")
    with pytest.raises(AssertionError, match="not declared as traced"):
        metrics.observe("vllm:request_params_n", 1, trace_id="a" * 32)


def test_both_formats_say_the_same() -> None:
    """Every family of a role, filled: the strict parser reads it, and finds the same samples."""
    for role in ("frontend", "engine"):
        metrics = filled(role)
        pages = [
            {
                (sample.name, tuple(sorted(sample.labels.items())))
                for family in read(metrics.exposition(form).decode())
                for sample in family.samples
            }
            for read, form in ((read_openmetrics, OPENMETRICS), (read_text, TEXT))
        ]
        assert pages[0] == pages[1]


@pytest.mark.parametrize(
    ("accept", "is_open"),
    [
        (PROMETHEUS, True),
        ("application/openmetrics-text", True),
        ("Application/OpenMetrics-Text; version=1.0.0; q=1", True),
        ("", False),
        ("*/*", False),
        ("text/plain", False),
        ("text/html,application/xhtml+xml,*/*;q=0.8", False),
        ("text/plain;version=0.0.4;q=0.6,application/openmetrics-text;q=0.5", False),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=much", False),
        ("application/openmetrics-texts, ;;,q=1", False),
    ],
)
def test_the_format_follows_the_accept_header(accept: str, is_open: bool) -> None:
    assert (accepted_format(accept) is OPENMETRICS) == is_open
