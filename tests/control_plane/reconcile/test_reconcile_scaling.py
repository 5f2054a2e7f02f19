"""Replicas that an autoscaler owns."""

from __future__ import annotations

from foveal_operator.kube.kinds import (
    BY_NAME,
    DEPLOYMENT,
    INFERENCE,
)
from foveal_operator.kube.types import Obj
from foveal_operator.testing.fake_cluster import FakeCluster
from tests.support.operator_rig import (
    KEY,
    Kit,
    resource,
)
from tests.support.served_resource import served


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
