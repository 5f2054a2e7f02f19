"""Series of every declared family over time, the same on every machine: what a small deployment
would show. Used by tests of `foveal dashboard`; a counter of one pod begins anew on the way.
`filled` is one process with each family once, `total` a sum in what such a process shows.
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Iterator

from prometheus_client.parser import text_string_to_metric_families

from foveal_operator.cli.dashboard.promql.samples import Labels, labels_of
from foveal_operator.observability.promql import PROCESS_METRICS
from foveal_runtime.plan.metrics import METRICS
from foveal_runtime.plan.metrics.metric import Metric, Role
from foveal_runtime.telemetry.metrics import Metrics

START = 1_790_000_003.0
"""Three seconds after a round time: no sample lies on the edge of a window."""
GAP_SECONDS = 10.0
RESTARTED_AT = 30
"""The scrape at which the second engine shows its counters from zero again."""
_VALUES = {
    "cache": ("ipc", "kv", "encoder", "processor"), "tier": ("host", "device"),
    "modality": ("image", "video"), "status": ("2xx", "5xx"), "state": ("active", "free"),
    "finished_reason": ("stop", "length"), "reason": ("room", "capacity"),
    "factor": ("0.5", "1", "2", "4"), "why": ("stale", "pull"), "stage": ("encode", "queue"),
    "code": ("engine_error", "media_invalid"),
    "source": ("measured", "planned"), "handler": ("/v1/chat/completions", "/readyz"),
}  # fmt: skip
PODS = {"frontend": ("qwen-api-0", "qwen-api-1"), "engine": ("qwen-engine-0", "qwen-engine-1")}
_ENGINES = ("engine-0", "engine-1")
"""Those that each frontend has a session with."""

Sample = tuple[str, Labels, float]


def scrapes(num: int) -> Iterator[tuple[float, list[Sample]]]:
    """(time, samples of all pods)."""
    for index in range(num):
        yield (
            START + index * GAP_SECONDS,
            [
                sample
                for metric in (*METRICS, *PROCESS_METRICS)
                for role in ("frontend", "engine")
                if role in metric.roles
                for pod in PODS[role]
                for sample in _family(metric, pod, index)
            ],
        )


def _family(metric: Metric, pod: str, index: int) -> Iterator[Sample]:
    names = [name for name in metric.labels if name not in ("process", "model_name")]
    own = {**_VALUES, "engine": (pod.removeprefix("qwen-"),) if "engine" in pod else _ENGINES}
    for values in itertools.product(*(own.get(name, ("x",)) for name in names)):
        labels = dict(zip(names, values, strict=True))
        if "process" in metric.labels:
            labels["process"] = pod.removeprefix("qwen-")
        labels |= {"pod": pod, "namespace": "models", "resource": "qwen", "model_name": "tiny"}
        seed = zlib.crc32(f"{metric.name}{sorted(labels.items())}".encode())
        yield from _samples(metric, labels, seed, index, is_restarted=pod.endswith("engine-1"))


def _samples(
    metric: Metric, labels: dict[str, str], seed: int, index: int, *, is_restarted: bool
) -> Iterator[Sample]:
    first = RESTARTED_AT if is_restarted and index >= RESTARTED_AT else 0
    speed = 1 + seed % 7
    if metric.kind == "gauge":
        value = random.Random(seed + index).random() * 100
        if metric.name == "process_start_time_seconds":
            value = START - 100 + first * GAP_SECONDS
        yield metric.name, labels_of(labels), value
        return
    grown = float(speed * (index - first)) + (index % (2 + seed % 3)) + (0 if first else 500)
    if metric.kind == "counter":
        yield f"{metric.name}_total", labels_of(labels), grown
        return
    bounds = [*metric.buckets[: 4 + seed % 5], float("inf")]
    for number, bound in enumerate(bounds):
        share = (number + 1) / len(bounds)
        text = "+Inf" if bound == float("inf") else str(float(bound))
        yield f"{metric.name}_bucket", labels_of({**labels, "le": text}), int(grown * share)
    yield f"{metric.name}_count", labels_of(labels), int(grown)
    yield f"{metric.name}_sum", labels_of(labels), grown * bounds[0]


def exposition(samples: list[Sample], time: float | None = None) -> str:
    """In the text format; with a time for each sample, as OpenMetrics has it."""
    stamp = "" if time is None else f" {time:.3f}"
    lines = []
    for name, labels, value in samples:
        inside = ",".join(f'{key}="{text}"' for key, text in labels)
        lines.append(f"{name}{{{inside}}} {value!r}{stamp}\n")
    return "".join(lines)


def filled(role: Role) -> Metrics:
    """The registry of a process with every family of its role, each once and traced where it can
    be."""
    metrics = Metrics(role, model_name="m", process="p", engine="e", max_model_len=4096)
    for metric in METRICS:
        if role not in metric.roles:
            continue
        given = {"model_name", "process"} | (
            {"engine"} if role == "engine" or metric.name.startswith("vllm:") else set()
        )
        labels = {name: "x" for name in metric.labels if name not in given}
        if metric.kind == "histogram":
            trace_id = "c" * 32 if metric.is_traced else ""
            metrics.observe(metric.name, 3.0, trace_id=trace_id, **labels)
        else:
            metrics.set(metric.name, 3.0, **labels)
    return metrics


def values(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    found = {}
    for family in families:
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found
            found[key] = sample.value
    return found


def total(text: str, name: str, **labels: str) -> float:
    wanted = labels.items()
    return sum(v for (n, ls), v in values(text).items() if n == name and wanted <= dict(ls).items())
