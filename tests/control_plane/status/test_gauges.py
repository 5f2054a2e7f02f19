"""The status as series: what dashboards and alerts about a resource are made of."""

from __future__ import annotations

from typing import Any

import msgspec
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from foveal_operator.api.status import Condition
from foveal_operator.status import gauges
from foveal_operator.status.gauges import METRIC, ColdStarts, phases
from foveal_operator.status.report import plain
from foveal_operator.telemetry.series import Telemetry
from tests.support.observed_status import BASE, ended, pod, revisions, serving, status_of
from tests.support.regenerate import planned
from tests.support.samples import put

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


def test_what_has_never_served_starts_and_what_served_is_unavailable() -> None:
    """A first load, and a resource at zero replicas, paged whoever was on call."""
    telemetry = Telemetry()
    _, engine = revisions(BASE)
    loading = {**serving(), "engine_pods": (pod("e-0", engine, ready=False),)}
    at_zero = put(put(BASE, "spec.frontend.replicas", 0), "spec.engine.replicas", 0)
    empty = {**serving(), "engine_pods": (), "frontend_pods": ()}
    seen: list[tuple[str, float]] = []
    previous: tuple[Condition, ...] = ()
    for obj, observed in (
        (BASE, {}), (BASE, loading), (BASE, {**loading, "deadline_exceeded": True}),
        (BASE, serving()), (BASE, loading), (at_zero, empty), (BASE, loading),
    ):  # fmt: skip
        status = status_of(obj, previous, **observed)
        gauges.put(telemetry, BASE, None, status)
        previous = status.conditions
        (reason,) = [one.reason for one in previous if one.type == "Available"]
        seen.append((reason, telemetry.value("foveal_inference_starting", **NAME)))
    assert seen == [
        ("Starting", 1), ("Starting", 1), ("Starting", 0),
        ("Available", 0), ("Unavailable", 0), ("ScaledToZero", 0), ("Starting", 1),
    ]  # fmt: skip


def test_a_condition_that_has_gone_says_nothing_any_more() -> None:
    telemetry = Telemetry()
    resource = told(telemetry, BASE, **failing())
    assert condition(telemetry, "Reconciling", "True") == 1
    told(telemetry, resource, **serving())
    assert b'type="Reconciling"' not in b"".join(telemetry.exposition())


def test_the_text_is_what_the_library_would_write() -> None:
    """Series of resources are written by us: the same ones, and values that read the same."""
    telemetry = Telemetry()
    told(telemetry, BASE, **failing(), measured={"ipc": 3 << 40})
    text = b"".join(telemetry.exposition()).decode()
    written = generate_latest(telemetry.registry).decode()
    pages = [
        {
            (family.name, family.type, family.documentation): {
                (sample.name, tuple(sorted(sample.labels.items()))): sample.value
                for sample in family.samples
            }
            for family in text_string_to_metric_families(page)
        }
        for page in (text, written)
    ]
    assert pages[0] == pages[1]
    (named,) = telemetry.exposition(["foveal_inference_ready"])
    assert {line.split("{")[0] for line in named.decode().splitlines() if line[0] != "#"} == {
        "foveal_inference_ready"
    }


def test_a_failure_is_counted_once() -> None:
    telemetry = Telemetry()
    resource = told(telemetry, BASE, **failing())
    resource = told(telemetry, resource, **failing())
    told(telemetry, resource, **failing())
    name = "foveal_inference_pod_failures_total"
    assert telemetry.value(name, **NAME, reason="OOMKilled") == 1


def test_a_failure_that_is_named_again_is_no_new_one() -> None:
    """A rollout deleted the pod of the last failure: the one before it paged again."""
    telemetry = Telemetry()
    _, engine = revisions(BASE)
    pods = tuple(
        pod(f"e-{number}", engine, **ended(137, reason="OOMKilled", at=at))
        for number, at in enumerate(("2026-01-01T00:00:00Z", "2026-01-01T01:00:00Z"))
    )
    resource = told(telemetry, BASE, **{**serving(), "engine_pods": pods[:1]})
    resource = told(telemetry, resource, **{**serving(), "engine_pods": pods})
    resource = told(telemetry, resource, **{**serving(), "engine_pods": pods[:1]})
    assert resource["status"]["lastFailure"]["pod"] == "e-0"
    name = "foveal_inference_pod_failures_total"
    assert telemetry.value(name, **NAME, reason="OOMKilled") == 2


def test_every_reason_begins_at_zero() -> None:
    """The first failure of a reason is an increase only where there was a series before it."""
    telemetry = Telemetry()
    told(telemetry, BASE, **serving())
    before = b"".join(telemetry.exposition()).decode()
    _, engine = revisions(BASE)
    found = {"FetchDenied", "FetchFailed", "NotFound", "ProfileFailed", "UnsupportedModel"}
    for end in (
        ended(2), ended(137, reason="OOMKilled"), ended(135), ended(1),
        ended(1, "CUDA out of memory"),
    ):  # fmt: skip
        broken = pod("e-0", engine, ready=False, **end)
        status = status_of(**{**serving(), "engine_pods": (broken,)})
        assert status.last_failure is not None
        found.add(status.last_failure.reason)
    assert found > {"InvalidArgument", "OOMKilled", "ShmFull", "DeviceFull", "Crashed"}
    of = 'foveal_inference_pod_failures_total{namespace="models",name="qwen",reason='
    assert not {reason for reason in found if f'{of}"{reason}"}} 0.0' not in before}


def test_budgets_that_have_gone_are_told_no_more() -> None:
    """FovealBudgetExceeded fired until the operator restarted: on a measurement whose pods were
    gone, and on a budget that the plan had no more."""
    telemetry = Telemetry()
    resource = told(telemetry, BASE, **serving(), measured={"ipc": 5 << 30})
    resource = told(telemetry, resource, **serving())
    assert b"foveal_inference_measured_bytes{" not in b"".join(telemetry.exposition())
    status = msgspec.structs.replace(status_of(**serving()), budgets={})
    gauges.put(telemetry, resource, None, status)
    assert b"foveal_inference_budget_bytes{" not in b"".join(telemetry.exposition())


def test_a_resource_that_has_gone_leaves_no_series() -> None:
    telemetry = Telemetry()
    told(telemetry, BASE, **failing())
    telemetry.forget_resource(**NAME)
    assert b'name="qwen"' not in b"".join(telemetry.exposition())


# --- cold starts ------------------------------------------------------------------------------
KEY = ("models", "qwen")


def started(name: str, made: int, **changes: Any) -> dict[str, Any]:
    """A pod made at minute `made`: a node after 2 s, its container after 32 s, ready after 92 s."""

    def at(offset: int) -> str:
        return f"2026-01-01T00:{made + offset // 60:02}:{offset % 60:02}Z"

    def true(kind: str, offset: int) -> dict[str, Any]:
        return {"type": kind, "status": "True", "lastTransitionTime": at(offset)}

    status = {
        "conditions": [true("PodScheduled", 2), true("Ready", 92)],
        "containerStatuses": [{"restartCount": 0, "state": {"running": {"startedAt": at(32)}}}],
    }
    metadata = {"name": name, "uid": name, "creationTimestamp": at(0)}
    return {"metadata": metadata, "status": {**status, **changes}}


def test_a_pods_start_is_made_of_three_phases() -> None:
    assert phases(started("a", 0)) == {"schedule": 2, "pull": 30, "start": 60}


def test_a_pod_that_is_not_ready_or_ran_before_tells_nothing() -> None:
    assert phases(started("a", 0, conditions=[])) == {}
    assert phases(started("a", 0, containerStatuses=[])) == {}
    again = [{"restartCount": 1, "state": {"running": {"startedAt": "2026-01-01T00:00:32Z"}}}]
    assert phases(started("a", 0, containerStatuses=again)) == {}
    waiting = [{"restartCount": 0, "state": {"waiting": {}}}]
    assert phases(started("a", 0, containerStatuses=waiting)) == {}


def test_the_newest_pod_counts_and_counts_once() -> None:
    telemetry, cold = Telemetry(), ColdStarts()

    def value() -> float:
        return telemetry.value(METRIC, **NAME, role="engine", phase="start")

    cold.put(telemetry, KEY, "engine", [started("a", 0), started("b", 1)])
    assert value() == 60
    late = started("b", 1)  # was not ready for a while: no cold start
    late["status"]["conditions"][1]["lastTransitionTime"] = "2026-01-01T05:00:00Z"
    cold.put(telemetry, KEY, "engine", [late])
    assert value() == 60
    telemetry.forget_resource(**NAME)
    cold.forget(KEY)
    assert METRIC.encode() + b"{" not in b"".join(telemetry.exposition())
