"""An object of a resource loses the label that the watches select by: to them it is deleted."""

from __future__ import annotations

import pytest

from foveal_operator.kube.errors import UserError
from foveal_operator.kube.kinds import (
    BY_NAME,
    DEPLOYMENT,
    INFERENCE,
    INSTANCE,
    MANAGED_BY,
    POD,
    STATEFUL_SET,
)
from foveal_operator.kube.types import Obj
from tests.support.operator_rig import KEY, Kit, resource
from tests.support.served_resource import served

AUTOMATIC = {"minReplicas": 2, "maxReplicas": 9}


def relabel(kit: Kit, kind: str, name: str, value: str = "") -> None:
    """Somebody takes the label away, or gives it another value."""

    def change(body: Obj) -> None:
        labels = body["metadata"]["labels"]
        labels.pop(MANAGED_BY)
        if value:
            labels[MANAGED_BY] = value

    kit.cluster.edit(BY_NAME[kind], "default", name, change)


def is_known_and_labelled(kit: Kit, kind: str, name: str) -> bool:
    live = kit.cluster.body(kind, name)["metadata"]
    known = kit.operator.caches.identity(BY_NAME[kind], "default", name)
    is_labelled = live["labels"].get(MANAGED_BY) == "foveal-operator"
    return is_labelled and known == (live["uid"], live["resourceVersion"])


@pytest.mark.parametrize("value", ["", "argocd"])
@pytest.mark.parametrize("has_pods", [True, False])
async def test_an_autoscaled_tier_keeps_its_size(kit: Kit, value: str, has_pods: bool) -> None:
    """The frontends were cut to minReplicas, and again at every pass until the next resync."""
    body = resource()
    body["spec"]["frontend"]["autoscaling"] = AUTOMATIC
    await served(kit, body, pods=has_pods)

    def scale(replicas: int) -> None:
        kit.cluster.edit(
            DEPLOYMENT, "default", "tiny-frontend",
            lambda live: live["spec"].update(replicas=replicas), manager="hpa",
        )  # fmt: skip

    scale(7)
    await kit.settle()
    relabel(kit, "Deployment", "tiny-frontend", value)
    await kit.settle()
    assert kit.cluster.body("Deployment", "tiny-frontend")["spec"]["replicas"] == 7
    assert is_known_and_labelled(kit, "Deployment", "tiny-frontend")
    scale(8)
    await kit.settle()
    assert kit.cluster.body("Deployment", "tiny-frontend")["spec"]["replicas"] == 8
    known = kit.operator.caches.get(DEPLOYMENT, "default", "tiny-frontend")
    assert known
    assert known["spec"]["replicas"] == 8, "the watch is believed again"


async def test_engines_switched_off_stay_off(kit: Kit) -> None:
    """Without any pod, too: what is recorded of the resource says that it has workloads."""
    body = resource()
    scaling = {**AUTOMATIC, "metric": "KVUsage", "prometheusAddress": "http://p:9090"}
    body["spec"]["engine"]["autoscaling"] = scaling
    await served(kit, body)
    kit.cluster.edit(
        STATEFUL_SET, "default", "tiny-engine",
        lambda live: live["spec"].update(replicas=0), manager="keda",
    )  # fmt: skip
    await kit.settle()
    relabel(kit, "StatefulSet", "tiny-engine")
    await kit.settle()
    assert kit.cluster.body("StatefulSet", "tiny-engine")["spec"]["replicas"] == 0
    assert is_known_and_labelled(kit, "StatefulSet", "tiny-engine")


async def test_pods_keep_the_image_that_is_recorded(kit: Kit) -> None:
    """A newer operator has another default image: without the basis it replaced every pod."""
    await served(kit, pods=True)
    newer = Kit(kit.cluster, image="foveal/runtime:2")
    await newer.resync()
    before = kit.cluster.body("StatefulSet", "tiny-engine")["spec"]["template"]
    jobs = kit.cluster.names("Job")
    relabel(newer, "ConfigMap", "tiny-basis")
    await newer.settle()
    assert kit.cluster.body("StatefulSet", "tiny-engine")["spec"]["template"] == before
    assert kit.cluster.names("Job") == jobs, "no model is profiled for an image that nobody wants"
    assert is_known_and_labelled(newer, "ConfigMap", "tiny-basis")


async def test_the_last_good_revision_is_still_known(kit: Kit) -> None:
    """The record was written anew: no revision to go back to."""
    await served(kit, pods=True)
    before = dict(kit.cluster.body("ConfigMap", "tiny-rollout")["data"])
    assert "good.json" in before
    changed = {**resource()["spec"]["frontend"], "cpu": "3"}
    kit.cluster.edit(INFERENCE, *KEY, lambda body: body["spec"].update(frontend=changed))
    await kit.settle()
    relabel(kit, "ConfigMap", "tiny-rollout")
    await kit.settle()
    after = kit.cluster.body("ConfigMap", "tiny-rollout")["data"]
    assert after["good.json"] == before["good.json"]
    assert is_known_and_labelled(kit, "ConfigMap", "tiny-rollout")


@pytest.mark.parametrize("with_pods", [False, True])
async def test_all_at_once(kit: Kit, with_pods: bool) -> None:
    """`kubectl label --all` over every kind: one pass puts all right, with pods and without."""
    await served(kit, pods=True)
    kit.hears = False
    labelled = [
        (kind, name)
        for kind, _, name in kit.cluster.objects
        if kind not in ("Pod", "Job", "Event") and BY_NAME[kind].watched
        if MANAGED_BY in kit.cluster.body(kind, name)["metadata"].get("labels", {})
    ]
    specs = {at: kit.cluster.body(*at).get("spec") for at in labelled}
    for kind, name in labelled:
        relabel(kit, kind, name)
    if with_pods:
        for name in kit.cluster.names("Pod"):
            relabel(kit, "Pod", name)
    kit.hears = True
    await kit.resync()
    assert len(labelled) > 8
    assert [at for at in labelled if not is_known_and_labelled(kit, *at)] == []
    assert {at: kit.cluster.body(*at).get("spec") for at in labelled} == specs
    assert kit.condition("Ready")[0] == "True"


async def test_pods_are_seen_without_it(kit: Kit) -> None:
    """Nothing gives it back to a pod, whose state and failures were unknown from then on."""
    await served(kit, pods=True)
    names = kit.cluster.names("Pod")
    for name in names:
        relabel(kit, "Pod", name, "argocd")
    await kit.settle()
    assert kit.condition("Ready")[0] == "True"
    assert all(kit.operator.caches.identity(POD, "default", name) for name in names)
    engine = next(name for name in names if "engine" in name)

    def fail(body: Obj) -> None:
        (ready,) = [one for one in body["status"]["conditions"] if one["type"] == "Ready"]
        ready["status"] = "False"

    kit.cluster.edit(POD, "default", engine, fail)
    await kit.settle()
    assert kit.condition("EnginesReady")[0] == "False", "and what becomes of them is reported"


async def test_a_service_whose_ports_were_changed_too_gets_it_back(kit: Kit) -> None:
    """Foreign ports are got rid of by a replacement, which took over the labels as they were; they
    then counted as the operator's own."""
    await served(kit)

    def change(body: Obj) -> None:
        body["spec"]["ports"] = [{"name": "http", "port": 1, "targetPort": 1}]
        body["metadata"]["labels"].pop(INSTANCE)

    kit.cluster.edit(BY_NAME["Service"], "default", "tiny", change)
    kit.fail(UserError("Duplicate value: http", 422), verb="APPLY", kind="Service", name="tiny")
    await kit.settle()
    found = kit.cluster.body("Service", "tiny")
    assert [port["port"] for port in found["spec"]["ports"]] == [8000]
    assert found["metadata"]["labels"][INSTANCE] == "tiny"


@pytest.mark.parametrize("value", ["", "other"])
@pytest.mark.parametrize("kind", ["Deployment", "Service", "ConfigMap"])
async def test_the_label_that_names_the_resource_comes_back(
    kit: Kit, kind: str, value: str
) -> None:
    """Only the resource that the label then named was looked at, if any."""
    await served(kit)
    name = "tiny-basis" if kind == "ConfigMap" else kit.cluster.names(kind)[0]

    def change(body: Obj) -> None:
        labels = body["metadata"]["labels"]
        labels.pop(INSTANCE)
        if value:
            labels[INSTANCE] = value

    kit.cluster.edit(BY_NAME[kind], "default", name, change)
    await kit.settle()
    assert kit.cluster.body(kind, name)["metadata"]["labels"][INSTANCE] == "tiny"
