"""The status as series: what dashboards and alerts about a resource are made of."""

from __future__ import annotations

from typing import Any

from tests.control_plane.regenerate import planned
from tests.control_plane.test_status import BASE, ended, pod, revisions, serving, status_of

from foveal_operator import gauges
from foveal_operator.status import plain
from foveal_operator.telemetry import Telemetry

NAME = {"namespace": "models", "name": "qwen"}


def condition(telemetry: Telemetry, kind: str, status: str) -> float:
    return telemetry.value("foveal_inference_condition", **NAME, type=kind, status=status)


def told(telemetry: Telemetry, resource: dict[str, Any], **observed: Any) -> dict[str, Any]:
    """Puts one status and returns the resource with it."""
    inference, _ = planned(BASE)
    status = status_of(**observed)
    gauges.put(telemetry, resource, inference, status)
    return {**resource, "status": plain(status)}


def failing() -> dict[str, Any]:
    _, engine = revisions(BASE)
    broken = pod("e-0", engine, ready=False, **ended(137, reason="OOMKilled"))
    return {**serving(), "engine_pods": (broken,)}


def test_conditions_replicas_and_budgets() -> None:
    telemetry = Telemetry()
    told(telemetry, BASE, **serving(), measured={"ipc": 5})
    assert condition(telemetry, "Ready", "True") == 1
    assert condition(telemetry, "Ready", "False") == 0
    assert telemetry.value("foveal_inference_max_pods", **NAME, role="engine") == 2
    assert telemetry.value("foveal_inference_measured_bytes", **NAME, budget="ipc") == 5
    planned_bytes = telemetry.value("foveal_inference_budget_bytes", **NAME, budget="ipc")
    assert planned_bytes == 4 << 30


def test_a_condition_that_has_gone_says_nothing_any_more() -> None:
    telemetry = Telemetry()
    resource = told(telemetry, BASE, **failing())
    assert condition(telemetry, "Reconciling", "True") == 1
    told(telemetry, resource, **serving())
    assert b'type="Reconciling"' not in telemetry.exposition()


def test_a_failure_is_counted_once() -> None:
    telemetry = Telemetry()
    resource = told(telemetry, BASE, **failing())
    resource = told(telemetry, resource, **failing())
    told(telemetry, resource, **failing())
    name = "foveal_inference_pod_failures_total"
    assert telemetry.value(name, **NAME, reason="OOMKilled") == 1


def test_a_resource_that_has_gone_leaves_no_series() -> None:
    telemetry = Telemetry()
    told(telemetry, BASE, **failing())
    gauges.forget(telemetry, **NAME)
    assert b'name="qwen"' not in telemetry.exposition()
