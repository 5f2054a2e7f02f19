"""A podTemplate over the operator's pods: what it adds, and what it cannot touch."""

from __future__ import annotations

import pytest

from foveal_operator.api.parse import SpecError
from foveal_operator.kube.types import Obj
from tests.support.regenerate import wanted
from tests.support.samples import put, resource

OVERLAY = {
    "metadata": {"annotations": {"note": "x"}, "labels": {"team": "vision"}},
    "spec": {
        "nodeSelector": {"gpu": "h100"},
        "tolerations": [{"key": "dedicated", "operator": "Exists"}],
        "containers": [
            {"name": "engine", "env": [{"name": "OTEL_SERVICE_NAME", "value": "qwen"}]},
            {"name": "sidecar", "image": "example/sidecar"},
        ],
    },
}


def test_an_overlay_adds_and_keeps() -> None:
    (plain,) = wanted(resource()).of_kind("StatefulSet")
    (laid,) = wanted(put(resource(), "spec.engine.podTemplate", OVERLAY)).of_kind("StatefulSet")
    template = laid["spec"]["template"]
    assert template["metadata"]["labels"]["team"] == "vision"
    assert [t["key"] for t in template["spec"]["tolerations"]] == ["nvidia.com/gpu", "dedicated"]
    engine, sidecar = template["spec"]["containers"]
    assert sidecar["name"] == "sidecar"
    before = plain["spec"]["template"]["spec"]["containers"][0]
    assert engine["env"][:-1] == before["env"]
    assert engine["args"] == before["args"]
    label = "foveal.dev/revision"
    assert (
        template["metadata"]["labels"][label]
        != (plain["spec"]["template"]["metadata"]["labels"][label])
    )


def of_engine(mounts: list[Obj]) -> Obj:
    """An overlay of the operator's own container."""
    return {"spec": {"containers": [{"name": "engine", "volumeMounts": mounts}]}}


def limited(cpu: object, role: str = "engine", memory: str = "", **more: object) -> Obj:
    """An overlay with a CPU limit, and what is locked beside it."""
    limits = {"cpu": cpu, **({"memory": memory} if memory else {})}
    own = {"name": role, "resources": {"limits": limits, **more}}
    return {"spec": {"containers": [own]}}


@pytest.mark.parametrize("cpu", ["64", 64])
def test_an_overlay_limits_the_cpu(cpu: object) -> None:
    """Where a quota counts limits.cpu, or a LimitRange has a lower default, no pod was admitted."""
    (plain,) = wanted(resource()).of_kind("StatefulSet")
    body = put(resource(), "spec.engine.podTemplate", limited(cpu))
    (laid,) = wanted(body).of_kind("StatefulSet")
    before, after = (
        one["spec"]["template"]["spec"]["containers"][0]["resources"] for one in (plain, laid)
    )
    assert after == {**before, "limits": {**before["limits"], "cpu": cpu}}


@pytest.mark.parametrize(
    "spec",
    [
        dict.fromkeys(["containers", "volumes", "tolerations", "securityContext", "affinity"]),
        {"containers": [{"name": "engine", "env": None, "volumeMounts": None}]},
        {"containers": [{"name": "engine", "resources": None}]},
        {"containers": [{"name": "engine", "resources": {"limits": None, "requests": None}}]},
        {"containers": [{"name": "engine", "resources": {"limits": {"cpu": None}}}]},
    ],
)
def test_a_key_with_nothing_behind_it_changes_nothing(spec: Obj) -> None:
    """The API server takes `tolerations:` for no list, in every other pod template."""
    (plain,) = wanted(resource()).of_kind("StatefulSet")
    body = put(resource(), "spec.engine.podTemplate", {"spec": spec})
    (laid,) = wanted(body).of_kind("StatefulSet")
    before, after = (one["spec"]["template"]["spec"] for one in (plain, laid))
    (container,) = after["containers"]
    assert container["resources"]["limits"].pop("cpu", None) is None
    assert {key: value for key, value in after.items() if value is not None} == before


@pytest.mark.parametrize("part", ["limits", "requests"])
def test_an_overlay_asks_for_storage(part: str) -> None:
    """Where a quota counts it no pod was admitted, and a cluster's own default evicted pods."""
    (plain,) = wanted(resource()).of_kind("StatefulSet")
    own = {"name": "engine", "resources": {part: {"ephemeral-storage": "4Gi"}}}
    overlay = {"spec": {"containers": [own]}}
    (laid,) = wanted(put(resource(), "spec.engine.podTemplate", overlay)).of_kind("StatefulSet")
    before, after = (
        one["spec"]["template"]["spec"]["containers"][0]["resources"] for one in (plain, laid)
    )
    assert after == {**before, part: {**before[part], "ephemeral-storage": "4Gi"}}


def test_a_cpu_limit_below_the_request_says_both() -> None:
    body = put(resource(), "spec.engine.cpu", "8")
    with pytest.raises(SpecError) as caught:
        wanted(put(body, "spec.engine.podTemplate", limited("500m")))
    assert caught.value.problems == [(
        "spec.engine.podTemplate.spec.containers[engine].resources.limits.cpu",
        "500m is below the 8 that the pods request: raise it, or lower spec.engine.cpu",
    )]  # fmt: skip


def test_an_overlay_mounts_a_volume_twice_and_keeps_ours() -> None:
    """Mounts were merged by the name of their volume: of two of one volume the second replaced the
    first, and one of `tmp` moved /tmp away."""
    more = [
        {"name": "adapters", "mountPath": "/loras", "subPath": "a"},
        {"name": "adapters", "mountPath": "/more", "subPath": "b"},
        {"name": "tmp", "mountPath": "/root/.cache"},
    ]
    (plain,) = wanted(resource()).of_kind("StatefulSet")
    laid = wanted(put(resource(), "spec.engine.podTemplate", of_engine(more)))
    before, after = (
        body["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]
        for body in (plain, *laid.of_kind("StatefulSet"))
    )
    assert after == [*before, *more]


def test_an_overlay_reads_our_volumes_elsewhere() -> None:
    """Such a resource was refused by a newer operator."""
    more = {"name": "model", "mountPath": "/loras", "subPath": "loras", "readOnly": True}
    laid = wanted(put(resource(), "spec.engine.podTemplate", of_engine([more])))
    (engines,) = laid.of_kind("StatefulSet")
    mounts = engines["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    assert mounts[-1] == more
    assert [one["mountPath"] for one in mounts if one["name"] == "model"] == ["/models", "/loras"]


@pytest.mark.parametrize(
    "overlay",
    [{"spec": None}, {"metadata": None}, {"metadata": {"labels": None, "annotations": None}}],
)
def test_what_is_left_of_an_emptied_map_is_nothing(overlay: Obj) -> None:
    """Server-side apply stores null for a map whose last entry is gone; it was refused."""
    plain = wanted(resource())
    for role in ("frontend", "engine"):
        laid = wanted(put(resource(), f"spec.{role}.podTemplate", overlay))
        assert [one.body for one in laid.objects] == [one.body for one in plain.objects]


def test_an_overlay_changes_how_pods_are_spread() -> None:
    """The API server takes one constraint for each key and strictness: a second one, with a skew or
    labels of its own, was refused."""

    def spread(*constraints: Obj) -> list[Obj]:
        body = resource()
        if constraints:
            overlay = {"spec": {"topologySpreadConstraints": list(constraints)}}
            body = put(body, "spec.frontend.podTemplate", overlay)
        (laid,) = wanted(body).of_kind("Deployment")
        found: list[Obj] = laid["spec"]["template"]["spec"]["topologySpreadConstraints"]
        return found

    (plain,) = spread()
    node = {"topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
    assert node.items() <= plain.items()
    more = {"maxSkew": 3, "matchLabelKeys": ["pod-template-hash"]}
    assert spread({**node, **more}) == [{**plain, **more}], "its selector stays"
    zone = {**node, "topologyKey": "topology.kubernetes.io/zone", "maxSkew": 1}
    strict = {**node, "whenUnsatisfiable": "DoNotSchedule", "maxSkew": 1}
    assert spread(zone, strict) == [plain, zone, strict]
    assert len(spread({"maxSkew": 1})) == 2, "the API server says what it lacks"


def test_a_path_is_one_path_however_it_is_written() -> None:
    """The API server refuses two mounts in one place only where they are written alike."""
    more = [{"name": "a", "mountPath": "/c"}, {"name": "a", "mountPath": "//c/", "readOnly": True}]
    laid = wanted(put(resource(), "spec.engine.podTemplate", of_engine(more)))
    (engines,) = laid.of_kind("StatefulSet")
    mounts = engines["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    assert [one for one in mounts if one["name"] == "a"] == [more[1]]


@pytest.mark.parametrize(
    ("source", "reads"),
    [
        ({"secret": {"secretName": "ca"}}, True),
        ({"csi": {"driver": "x", "volumeAttributes": {"secretProviderClass": "ca"}}}, True),
        ({"configMap": {"name": "ca"}}, False),
    ],
)
def test_a_new_secret_restarts_engines_that_read_one(source: Obj, reads: bool) -> None:
    overlay = {"spec": {"volumes": [{"name": "extra", **source}]}}
    body = put(resource(), "spec.engine.podTemplate", overlay)
    (engines,) = wanted(put(body, "spec.security.secretRevision", "2")).of_kind("StatefulSet")
    annotations = engines["spec"]["template"]["metadata"].get("annotations", {})
    assert ("foveal.dev/secret-revision" in annotations) is reads


@pytest.mark.parametrize(
    ("overlay", "field"),
    [
        ({"spec": {"containers": [{"name": "engine", "args": []}]}}, "containers[engine].args"),
        (limited("8", requests={"cpu": "1"}), "containers[engine].resources.requests"),
        (limited("8", memory="1Gi"), "containers[engine].resources.limits.memory"),
        (limited("8", requests=5), "containers[engine].resources"),
        (limited("8", requests={"memory": None}), "containers[engine].resources.requests.memory"),
        (
            limited("8", requests={"ephemeral-storage": "much"}),
            "resources.requests.ephemeral-storage",
        ),
        (limited("much"), "containers[engine].resources.limits.cpu"),
        (limited("0"), "containers[engine].resources.limits.cpu"),
        (limited({}), "containers[engine].resources.limits.cpu"),
        (limited("100m"), "containers[engine].resources.limits.cpu"),
        ({"spec": {"containers": [{"name": "engine", "resources": 5}]}}, "[engine].resources"),
        (
            {"spec": {"containers": [{"name": "engine", "resources": {"limits": ["cpu"]}}]}},
            "[engine].resources",
        ),
        ({"spec": {"containers": [{"image": "x"}]}}, "spec.engine.podTemplate.spec.containers"),
        ({"spec": {"hostNetwork": True}}, "spec.engine.podTemplate.spec.hostNetwork"),
        ({"spec": {"volumes": {}}}, "spec.engine.podTemplate.spec.volumes"),
        ({"spec": {"containers": {}}}, "spec.engine.podTemplate.spec.containers"),
        ({"spec": {"volumes": [{"name": "shm", "emptyDir": {}}]}}, "spec.volumes[shm]"),
        (
            {"spec": {"containers": [{"name": "engine", "env": [{"name": "POD_IP"}]}]}},
            "env[POD_IP]",
        ),
        (of_engine([{"name": "big", "mountPath": "/tmp/"}]), "volumeMounts[/tmp/]"),
        (
            of_engine([{"name": "model", "mountPath": "/data", "readOnly": False}]),
            "containers[engine].volumeMounts[/data]",
        ),
        (of_engine([{"name": "mine", "mountPath": "/models"}]), "volumeMounts[/models]"),
        (of_engine([{"name": "mine", "mountPath": "//models/"}]), "volumeMounts[//models/]"),
        (of_engine([{"name": "mine", "mountPath": "models"}]), "volumeMounts[models]"),
        (
            of_engine([{"name": "model", "mountPath": "//models", "readOnly": False}]),
            "volumeMounts[//models]",
        ),
        (of_engine([{"name": "model", "mountPath": "/data"}]), "volumeMounts[/data]"),
        ({"metadata": {"name": "x"}}, "spec.engine.podTemplate.metadata.name"),
        ({"metadata": {"labels": {"foveal.dev/revision": "x"}}}, "labels.foveal.dev/revision"),
        ({"status": {}}, "spec.engine.podTemplate.status"),
        ({"spec": []}, "spec.engine.podTemplate.spec"),
        ({"metadata": {"labels": [1]}}, "spec.engine.podTemplate.metadata.labels"),
        ({"metadata": {"labels": 5}}, "spec.engine.podTemplate.metadata.labels"),
        ({"metadata": {"annotations": 5}}, "spec.engine.podTemplate.metadata.annotations"),
        (
            {"spec": {"containers": [{"name": "engine", "env": [{"name": {}}]}]}},
            "spec.containers[engine].env.name",
        ),
        (of_engine([{"name": "a", "mountPath": {}}]), "containers[engine].volumeMounts.mountPath"),
        ({"spec": {"volumes": [{"name": []}]}}, "spec.engine.podTemplate.spec.volumes.name"),
    ],
)
def test_an_overlay_cannot_touch_what_is_derived(overlay: Obj, field: str) -> None:
    with pytest.raises(SpecError) as caught:
        wanted(put(resource(), "spec.engine.podTemplate", overlay))
    assert any(field in path for path, _ in caught.value.problems)
