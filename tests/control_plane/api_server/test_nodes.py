"""The played nodes beside the real controllers: what other tests rely on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from foveal_operator.kube.cluster import KubeCluster, load_configuration
from foveal_operator.kube.kinds import POD
from foveal_operator.telemetry.series import Telemetry
from tests.support.api_server import nodes as fates
from tests.support.api_server.api import Api
from tests.support.api_server.nodes import Nodes
from tests.support.api_server.programs import Cluster

POD_SECURITY = {
    "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
    "automountServiceAccountToken": False,
}
CONTAINER = {
    "name": "main",
    "image": "registry.example/one:1",
    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
}


@pytest.fixture
def nodes(controlled_cluster: Cluster, namespace: str) -> Iterator[Nodes]:
    with Nodes(controlled_cluster, namespace, devices=2) as running:
        yield running


def workload(kind: str, namespace: str, replicas: int = 1, devices: int = 0) -> dict[str, Any]:
    labels = {"app.kubernetes.io/component": "engine"}
    limits = {"nvidia.com/gpu": str(devices)} if devices else {}
    container = {**CONTAINER, "resources": {"limits": limits}}
    pod = {**POD_SECURITY, "containers": [container]}
    spec: dict[str, Any] = {"template": {"metadata": {"labels": labels}, "spec": pod}}
    if kind == "Job":
        pod["restartPolicy"] = "Never"
        spec["backoffLimit"] = 0
    else:
        spec |= {"replicas": replicas, "selector": {"matchLabels": labels}}
    if kind == "StatefulSet":
        spec["podManagementPolicy"] = "Parallel"
    version = "batch/v1" if kind == "Job" else "apps/v1"
    metadata = {"name": "w", "namespace": namespace}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


@pytest.mark.parametrize("kind", ["Deployment", "StatefulSet"])
def test_workloads_become_ready_shrink_and_go(
    api: Api, nodes: Nodes, namespace: str, kind: str
) -> None:
    api.apply(workload(kind, namespace, 2)).must()
    pods = nodes.wait_for("engine", 2)
    assert len({pod["status"]["podIP"] for pod in pods}) == 2
    api.wait(kind, namespace, "w", lambda o: o and o["status"].get("readyReplicas") == 2)
    api.apply(workload(kind, namespace, 1)).must()
    nodes.wait_for("engine", 1)
    api.delete(kind, namespace, "w").must()
    nodes.wait_for("engine", 0)


@pytest.mark.parametrize(
    ("fate", "reason"),
    [
        (fates.CRASH, "CrashLoopBackOff"),
        (fates.OUT_OF_MEMORY, "CrashLoopBackOff"),
        (fates.IMAGE_PULL, "ImagePullBackOff"),
    ],
)
def test_pods_fail_as_told_and_recover(
    api: Api, nodes: Nodes, namespace: str, fate: fates.Fate, reason: str
) -> None:
    nodes.fate(fate, component="engine")
    api.apply(workload("StatefulSet", namespace)).must()

    def waits(pod: dict[str, Any] | None) -> bool:
        statuses = (pod or {}).get("status", {}).get("containerStatuses", [])
        return [s["state"].get("waiting", {}).get("reason") for s in statuses] == [reason]

    pod = api.wait("Pod", namespace, "w-0", waits)
    assert pod is not None
    last = pod["status"]["containerStatuses"][0]["lastState"]
    assert last.get("terminated", {}).get("exitCode", 0) == fate.exit_code
    nodes.fate(fates.READY, component="engine")
    nodes.wait_for("engine", 1)


def test_devices_run_out(api: Api, nodes: Nodes, namespace: str) -> None:
    api.apply(workload("StatefulSet", namespace, 3, devices=1)).must()
    api.wait("StatefulSet", namespace, "w", lambda o: o and o["status"].get("readyReplicas") == 2)
    waiting = [pod for pod in nodes.pods() if not pod["spec"].get("nodeName")]
    assert len(waiting) == 1


@pytest.mark.parametrize(
    ("fate", "condition"), [(None, "Complete"), (fates.FAILED, "Failed")], ids=["done", "failed"]
)
def test_jobs_end(
    api: Api, nodes: Nodes, namespace: str, fate: fates.Fate | None, condition: str
) -> None:
    if fate:
        nodes.fate(fate)
    api.apply(workload("Job", namespace)).must()

    def ended(job: dict[str, Any] | None) -> bool:
        conditions = (job or {}).get("status", {}).get("conditions", ())
        return any(c["type"] == condition and c["status"] == "True" for c in conditions)

    api.wait("Job", namespace, "w", ended)


def test_owned_objects_go_with_their_owner(api: Api, nodes: Nodes, namespace: str) -> None:
    """The garbage collector is real: what Foveal relies on when a resource is deleted."""
    owner = workload("StatefulSet", namespace, 0)
    uid = api.apply(owner).must()["metadata"]["uid"]
    reference = {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "w", "uid": uid}
    metadata = {"name": "c", "namespace": namespace, "ownerReferences": [reference]}
    api.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}).must()
    api.delete("StatefulSet", namespace, "w").must()
    api.wait("ConfigMap", namespace, "c", lambda obj: obj is None)


async def test_pods_are_listed_by_their_node_or_as_waiting_for_one(
    controlled_cluster: Cluster, api: Api, namespace: str
) -> None:
    """What a rollout lists instead of all pods of the cluster: the API server knows the fields."""
    for name, node in (("bound", {"nodeName": "some-node"}), ("waits", {})):
        spec = {**POD_SECURITY, "containers": [CONTAINER], **node}
        metadata = {"name": name, "namespace": namespace}
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
        api.create(body).must()
    config = await load_configuration(str(controlled_cluster.kubeconfig("fields")))
    client = KubeCluster(config, Telemetry())
    try:
        found = {
            fields: [
                pod["metadata"]["name"]
                for pod in await client.list_all(POD, namespace, fields=fields)
            ]
            for fields in ("spec.nodeName=,status.phase=Pending", "spec.nodeName=some-node")
        }
    finally:
        await client.close()
    assert list(found.values()) == [["waits"], ["bound"]]
