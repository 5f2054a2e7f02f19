"""Ways in and queues: Services, routes that share a host name or a model, queued engines."""

from __future__ import annotations

from typing import Any

import pytest

from foveal_operator.api import reasons
from foveal_operator.kube.types import Obj
from foveal_operator.pods.diagnose import diagnose
from foveal_operator.rollout.record import State, advance
from foveal_operator.rollout.view import RolloutView, _pod
from tests.support.regenerate import wanted
from tests.support.samples import LEGAL, put, resource

QUEUE = "kueue.x-k8s.io/queue-name"


def route(**fields: Any) -> Obj:
    given = {"parentRefs": [{"name": "gw"}], **fields}
    (body,) = wanted(resource(networking={"httpRoute": given})).of_kind("HTTPRoute")
    found: Obj = body["spec"]
    return found


def test_a_route_without_matches_takes_all_of_its_host_names() -> None:
    spec = route(hostnames=["*.example.org"])
    assert spec["hostnames"] == ["*.example.org"]
    (rule,) = spec["rules"]
    assert rule["matches"] == [{"path": {"type": "PathPrefix", "value": "/"}}]
    assert rule["backendRefs"] == [{"name": "qwen", "port": 8000}]


def test_two_models_share_a_host_name_by_path_or_header() -> None:
    header = {"name": "x-model", "value": "qwen"}
    spec = route(matches=[{"path": "/qwen", "stripPath": True}, {"headers": [header]}])
    by_path, by_header = spec["rules"]
    assert by_path["matches"][0]["path"]["value"] == "/qwen"
    rewrite = by_path["filters"][0]["urlRewrite"]["path"]
    assert rewrite == {"type": "ReplacePrefixMatch", "replacePrefixMatch": "/"}
    assert by_header["matches"][0]["headers"] == [{"type": "Exact", **header}]
    assert "filters" not in by_header
    assert all(len(rule["matches"]) == 1 for rule in spec["rules"])


def test_a_canary_gets_its_share_under_every_match() -> None:
    spec = route(
        matches=[{"path": "/a"}, {"path": "/b"}],
        weight=90,
        splits=[{"name": "qwen-next", "weight": 10, "port": 8080}],
    )
    assert len(spec["rules"]) == 2
    for rule in spec["rules"]:
        assert rule["backendRefs"] == [
            {"name": "qwen", "port": 8000, "weight": 90},
            {"name": "qwen-next", "port": 8080, "weight": 10},
        ]


def test_the_clients_service_is_as_asked_and_the_engines_is_not() -> None:
    services = {s["metadata"]["name"]: s for s in wanted(LEGAL["routed"]).of_kind("Service")}
    entry = services["qwen"]
    assert entry["spec"]["type"] == "LoadBalancer"
    assert entry["metadata"]["annotations"] == {"service.kubernetes.io/topology-mode": "Auto"}
    assert services["qwen-engine"]["spec"]["clusterIP"] == "None"
    assert "annotations" not in services["qwen-engine"]["metadata"]


def test_only_engine_pods_are_queued() -> None:
    objects = wanted(LEGAL["routed"])
    (engines,), (frontends,) = objects.of_kind("StatefulSet"), objects.of_kind("Deployment")
    assert engines["spec"]["template"]["metadata"]["labels"][QUEUE] == "team-a"
    assert QUEUE not in frontends["spec"]["template"]["metadata"]["labels"]
    assert QUEUE not in engines["spec"]["selector"]["matchLabels"]
    by_template = put(
        resource(), "spec.frontend.podTemplate", {"metadata": {"labels": {QUEUE: "b"}}}
    )
    (frontends,) = wanted(by_template).of_kind("Deployment")
    assert frontends["spec"]["template"]["metadata"]["labels"][QUEUE] == "b"


def queued_pod(scheduled: str = "", status: str = "") -> Obj:
    """Held by Kueue, or let go; the condition keeps its time when only the gates are lifted."""
    gates = [] if scheduled else [{"name": "kueue.x-k8s.io/admission"}]
    status = status or ("True" if scheduled else "False")
    condition = {"type": "PodScheduled", "status": status, "lastTransitionTime": scheduled}
    if not scheduled:
        condition["reason"] = "SchedulingGated"
    labels = {QUEUE: "team-a", "foveal.dev/revision": "new"}
    return {
        "metadata": {
            "name": "qwen-engine-0",
            "labels": labels,
            "creationTimestamp": "1970-01-01T00:00:00Z",
        },
        "spec": {"schedulingGates": gates},
        "status": {"phase": "Pending", "conditions": [condition]},
    }


def test_a_gated_pod_waits_and_has_not_failed() -> None:
    found = diagnose([queued_pod()])
    assert found is not None
    assert found.reason is reasons.QUEUED
    assert "kueue.x-k8s.io/admission" in found.message
    assert not reasons.QUEUED.action, "nothing is to be done: no Warning is made of it"


@pytest.mark.parametrize(
    ("pod", "fails"),
    [
        (queued_pod(), False),
        (queued_pod("1970-01-01T02:40:00Z"), False),
        (queued_pod("1970-01-01T02:00:00Z"), True),
        (queued_pod("1970-01-01T00:00:00Z", "False"), False),
    ],
    ids=["gated", "admitted lately", "admitted long ago", "admitted, no node yet"],
)
def test_the_deadline_does_not_run_in_a_queue(pod: Obj, fails: bool) -> None:
    now = 10_000.0  # 2:46:40 after the pod was made
    view = RolloutViewStub(now)
    read = _pod(view, pod, serves=False)  # type: ignore[arg-type]
    assert not read.is_hopeless
    state = State(revision="new", generation=1, since_seconds=0.0)
    after = advance(
        state, (read,), ("new", "f"),
        is_complete=False, is_off=False, now=now, deadline_seconds=1800.0,
    )  # fmt: skip
    assert after.failed is fails


class RolloutViewStub:
    """What reading one pod asks of a view."""

    awaiting: frozenset[str] = frozenset()

    def __init__(self, now: float) -> None:
        self.now = now
        self.load: dict[str, int] = {}


assert {"now", "load"} <= set(RolloutView.__struct_fields__)
