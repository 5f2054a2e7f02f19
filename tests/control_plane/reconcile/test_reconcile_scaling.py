"""Replicas that an autoscaler owns, and frontends that come and go."""

from __future__ import annotations

import pytest

from foveal_operator.kube.kinds import (
    BY_NAME,
    DEPLOYMENT,
    INFERENCE,
    POD,
)
from foveal_operator.kube.types import Obj
from foveal_operator.manifests.network import frontend_ports
from foveal_operator.testing.fake_cluster import FakeCluster
from tests.support.operator_rig import (
    KEY,
    Kit,
    resource,
)
from tests.support.served_resource import add_pod, served


def scaled() -> Obj:
    body = resource()
    body["spec"]["frontend"]["autoscaling"] = {"minReplicas": 2, "maxReplicas": 9}
    return body


def scale(cluster: FakeCluster, replicas: int) -> None:
    def change(body: Obj) -> None:
        body["spec"]["replicas"] = replicas

    cluster.edit(DEPLOYMENT, "default", "tiny-frontend", change, manager="kube-controller-manager")


async def test_the_autoscaler_gets_the_replicas_and_none_is_lost(kit: Kit) -> None:
    """Leaving the field out while we are its only owner would reset it to one."""
    await served(kit)

    def automatic(body: Obj) -> None:
        body["spec"]["frontend"] = scaled()["spec"]["frontend"]

    scale(kit.cluster, 4)
    await kit.settle()
    kit.cluster.edit(INFERENCE, *KEY, automatic)
    await kit.settle()
    live = [kit.cluster.body("Deployment", "tiny-frontend")["spec"]["replicas"]]
    for wanted in (5, 7, 3):
        scale(kit.cluster, wanted)
        await kit.settle()
        live.append(kit.cluster.body("Deployment", "tiny-frontend")["spec"]["replicas"])
    assert live[1:] == [5, 7, 3]
    assert kit.cluster.names("HorizontalPodAutoscaler") == ["tiny-frontend"]
    owners = kit.cluster.owners["Deployment", "default", "tiny-frontend"]
    assert ("spec", "replicas") not in owners["foveal-operator"]


async def test_what_the_autoscaler_says_of_itself_is_in_the_status(kit: Kit) -> None:
    await served(kit, scaled())
    assert kit.condition("ScalingActive") == ("Unknown", "Waiting")

    def inert(body: Obj) -> None:
        body["status"] = {
            "conditions": [{"type": "ScalingActive", "status": "False", "message": "no metrics"}]
        }

    kit.cluster.edit(
        BY_NAME["HorizontalPodAutoscaler"], *KEY[:1], "tiny-frontend", inert, manager="controller"
    )
    await kit.settle()
    assert kit.condition("ScalingActive") == ("False", "AutoscalerInert")
    events = [b for (k, _, _), b in kit.cluster.objects.items() if k == "Event"]
    said = [e["note"] for e in events if e["reason"] == "AutoscalerInert"]
    assert len(said) == 1
    assert "HorizontalPodAutoscaler tiny-frontend: no metrics" in said[0]
    kit.cluster.edit(INFERENCE, *KEY, lambda body: body["spec"]["frontend"].pop("autoscaling"))
    await kit.settle()
    assert kit.condition("ScalingActive") == ("", "")


def resize(kit: Kit, replicas: int) -> None:
    """Both tiers, by the resource."""

    def change(body: Obj) -> None:
        for role in ("engine", "frontend"):
            body["spec"][role]["replicas"] = replicas

    kit.cluster.edit(INFERENCE, *KEY, change)


def series(kit: Kit, family: str) -> float:
    return kit.telemetry.value(family, namespace="default", name="tiny")


@pytest.mark.parametrize("has_served", [True, False])
@pytest.mark.parametrize("has_pods", [True, False])
async def test_a_scale_up_from_zero_has_a_deadline(
    kit: Kit, has_served: bool, has_pods: bool
) -> None:
    """The rollout counted as done: Starting held for ever, and no alert fired."""
    if has_served:
        await served(kit, pods=True)
        assert kit.condition("Available") == ("True", "Available")
        resize(kit, 0)
        await kit.settle()
        for role in ("engine", "frontend"):
            kit.cluster.remove(POD, "default", f"tiny-{role}-0")
    else:
        body = resource()
        for role in ("engine", "frontend"):
            body["spec"][role]["replicas"] = 0
        await served(kit, body)
    await kit.settle()
    assert kit.condition("Available") == ("False", "ScaledToZero")
    kit.time.now += 9_000.0
    resize(kit, 1)
    await kit.settle()
    if has_pods:
        add_pod(kit.cluster, "engine", ready=False)
        add_pod(kit.cluster, "frontend", ready=False)
        await kit.settle()
    assert kit.condition("Available") == ("False", "Starting")
    assert series(kit, "foveal_inference_starting") == 1
    assert kit.condition("Stalled") == ("", ""), "the time at zero does not count"
    kit.time.now += 9_000.0
    await kit.settle()
    assert kit.condition("Stalled") == ("True", "ProgressDeadlineExceeded")
    assert series(kit, "foveal_inference_stalled") == 1
    assert series(kit, "foveal_inference_starting") == 0, "FovealUnavailable fires"
    if has_pods:
        for role in ("engine", "frontend"):
            kit.cluster.remove(POD, "default", f"tiny-{role}-0")
            add_pod(kit.cluster, role)
        await kit.settle()
        assert kit.condition("Available") == ("True", "Available")
        assert kit.condition("Stalled") == ("", "")


async def test_the_policy_admits_to_the_old_port_until_no_frontend_serves_it(kit: Kit) -> None:
    """It carried the new number alone, or a name, which some network plug-ins do not resolve."""

    def ports() -> list[int]:
        (rule,) = kit.cluster.body("NetworkPolicy", "tiny-frontend")["spec"]["ingress"]
        return [port["port"] for port in rule["ports"]]

    await served(kit, pods=True)
    (before,) = ports()
    networking = {**resource()["spec"].get("networking", {}), "port": 9000}
    kit.cluster.edit(INFERENCE, *KEY, lambda body: body["spec"].update(networking=networking))
    await kit.settle()
    assert sorted(ports()) == sorted([before, 9000])
    template = kit.cluster.body("Deployment", "tiny-frontend")["spec"]["template"]
    assert frontend_ports([template]) == (9000,)
    assert sorted(ports()) == sorted([before, 9000]), "a pod still serves it"
    kit.cluster.remove(POD, "default", "tiny-frontend-0")
    add_pod(kit.cluster, "frontend")
    await kit.settle()
    assert ports() == [9000]
