"""The difference between what is wanted and what lives: by value, by name, by field."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from foveal_operator.kube.diff import Change, diff, restart_reasons
from foveal_operator.kube.types import Obj
from tests.support.regenerate import wanted
from tests.support.samples import LEGAL, put, resource


def live(obj: Obj) -> Obj:
    """As an API server would return it: defaults and others' fields added, sizes respelled."""
    found = copy.deepcopy(obj)
    found["metadata"]["uid"] = "0d9a"
    found["metadata"].setdefault("annotations", {})["someone"] = "else"
    found["status"] = {"replicas": 1}
    return found


def test_what_the_server_adds_is_no_difference() -> None:
    for name in LEGAL:
        for owned in wanted(LEGAL[name]).objects:
            assert diff(owned.body, live(owned.body)) == []


def test_quantities_are_compared_by_value() -> None:
    mine = {"spec": {"resources": {"limits": {"memory": "0.5Gi", "cpu": "1000m"}}}}
    theirs = {"spec": {"resources": {"limits": {"memory": "512Mi", "cpu": "1"}}}}
    assert diff(mine, theirs) == []
    theirs["spec"]["resources"]["limits"]["cpu"] = "2"
    assert [c.path for c in diff(mine, theirs)] == ["spec.resources.limits.cpu"]


def test_quantities_of_devices_are_compared_by_value() -> None:
    """A sidecar's `example.com/nic: 1`, a number, is a text where the API server keeps it."""
    mine = {"resources": {"limits": {"example.com/nic": 1, "hugepages-2Mi": "1024Mi"}}}
    theirs = {"resources": {"limits": {"example.com/nic": "1", "hugepages-2Mi": "1Gi"}}}
    assert diff(mine, theirs) == []
    theirs["resources"]["limits"]["example.com/nic"] = "2"
    assert [c.path for c in diff(mine, theirs)] == ["resources.limits.example.com/nic"]


def test_what_the_server_drops_in_a_pod_is_no_difference() -> None:
    def pod(environment: Obj, probe: Obj, annotations: Obj) -> Obj:
        container = {"name": "a", "env": [{"name": "PROXY", **environment}], "probe": probe}
        template = {"metadata": {"annotations": annotations}, "spec": {"containers": [container]}}
        return {"spec": {"template": template}}

    kept = {"team": ""}
    mine = pod({"value": ""}, {"initialDelaySeconds": 0}, kept)
    assert diff(mine, pod({}, {}, kept)) == []
    assert [c.path for c in diff(mine, pod({"value": "http://p"}, {}, {}))] == [
        "spec.template.metadata.annotations.team",
        "spec.template.spec.containers[a].env[PROXY].value",
    ]


def test_a_field_that_is_true_where_it_is_absent_is_missed() -> None:
    wish = {"automountServiceAccountToken": False}
    assert [c.path for c in diff(wish, {})] == ["automountServiceAccountToken"]
    assert diff({"immutable": False}, {}) == []


def test_a_drifted_field_is_named() -> None:
    (deployment,) = wanted(resource()).of_kind("Deployment")
    found = live(deployment)
    found["spec"]["template"]["spec"]["containers"][0]["image"] = "other"
    changes = diff(deployment, found)
    assert [c.path for c in changes] == ["spec.template.spec.containers[frontend].image"]
    assert "other -> registry.example" in str(changes[0])


def test_only_changes_of_the_pod_template_restart() -> None:
    def engine(**caches: Any) -> Obj:
        (found,) = wanted(resource(caches=caches)).of_kind("StatefulSet")
        return found

    before = live(engine())
    assert restart_reasons(engine(), before) == []
    paths = [c.path for c in restart_reasons(engine(ipc={"size": "1Gi"}), before)]
    assert "spec.template.metadata.labels.foveal.dev/revision" in paths
    (scaled,) = wanted(put(resource(), "spec.engine.replicas", 5)).of_kind("StatefulSet")
    assert [c.path for c in diff(scaled, before)] == ["spec.replicas"]
    assert restart_reasons(scaled, before) == []


def test_what_is_not_there_is_one_change() -> None:
    (service, *_) = wanted(resource()).of_kind("Service")
    (change,) = diff(service, None)
    assert change.before is None
    assert restart_reasons(service, None) == []


@pytest.mark.parametrize(
    ("mine", "theirs", "paths"),
    [
        ({"a": [1, 2]}, {"a": [1]}, ["a"]),
        ({"a": [{"name": "x"}]}, {"a": [{"port": 1}]}, ["a[0].name"]),
        ({"a": [{"port": 1}]}, {"a": [{"name": "x"}]}, ["a[0].port"]),
        ({"a": {"b": 1}}, {"a": "text"}, ["a"]),
        ({"a": "text"}, {"a": ["text"]}, ["a"]),
        ({"limits": {"cpu": "1"}}, {"limits": {"cpu": "much"}}, ["limits.cpu"]),
    ],
)
def test_other_shapes_differ(mine: Obj, theirs: Obj, paths: list[str]) -> None:
    assert [change.path for change in diff(mine, theirs)] == paths


def test_a_difference_of_bytes_is_told_in_gib() -> None:
    assert str(Change("engine.json caches.kv_bytes", 8 << 30, 2 << 30)).endswith("(-6.00 GiB)")
    assert str(Change("frontend.json processor_bytes", 0, 3 << 29)).endswith(
        "-> 1610612736 (+1.50 GiB)"
    )
    assert str(Change("engine.json caches.block_size", 16, 32)) == (
        "engine.json caches.block_size: 16 -> 32"
    )
    assert str(Change("engine.json caches.warm_bytes", None, 5)).endswith("(none) -> 5")
