"""A resource with all its objects, made by steps that controllers and kubelet would do."""

from __future__ import annotations

import copy

from foveal_operator.kube.kinds import (
    BY_NAME,
    JOB,
    POD,
)
from foveal_operator.kube.types import Obj
from foveal_operator.testing.fake_cluster import FakeCluster
from tests.support.operator_rig import (
    EXAMPLES,
    Kit,
    resource,
)

PROFILE = (EXAMPLES / "profiles" / "tiny-vlm.json").read_text(encoding="utf-8")
EXPECTED = {
    "Deployment": ["tiny-frontend"],
    "NetworkPolicy": ["tiny-engine", "tiny-frontend", "tiny-model"],
    "Secret": ["tiny-curve"],
    "Service": ["tiny", "tiny-engine"],
    "ServiceAccount": ["tiny"],
    "StatefulSet": ["tiny-engine"],
}


def versions(cluster: FakeCluster) -> dict[str, str]:
    return {"/".join(k): b["metadata"]["resourceVersion"] for k, b in cluster.objects.items()}


def finish_fetch(cluster: FakeCluster) -> str:
    """What the Job controller does when the model is there. Returns the Job's name."""
    (name,) = [n for n in cluster.names("Job") if "-fetch-" in n]
    done = {"conditions": [{"type": "Complete", "status": "True"}]}
    cluster.edit(JOB, "default", name, lambda body: body.update(status=done))
    return name


def finish_profile(cluster: FakeCluster, text: str = "") -> None:
    """What Job controller and kubelet do: the profile Job's pod ends with the document."""
    (name,) = [n for n in cluster.names("Job") if "-profile-" in n]
    job = cluster.body("Job", name)
    labels = {**job["spec"]["template"]["metadata"]["labels"], "job-name": name}
    ref = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": job["metadata"]["uid"]}
    ref["controller"] = True  # type: ignore[assignment]
    if f"{name}-x" in cluster.names("Pod"):
        cluster.remove(POD, "default", f"{name}-x")  # of a Job that has gone
    ended = {"exitCode": 0, "message": text or PROFILE, "finishedAt": "2026-01-01T00:01:00Z"}
    cluster.add(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": f"{name}-x", "namespace": "default", "labels": labels,
                "ownerReferences": [ref],
            },
            "spec": copy.deepcopy(job["spec"]["template"]["spec"]),
            "status": {
                "phase": "Succeeded",
                "containerStatuses": [{"name": "profile", "state": {"terminated": ended}}],
            },
        }
    )  # fmt: skip

    def complete(body: Obj) -> None:
        conditions = [{"type": "Complete", "status": "True"}]
        body["status"] = {"succeeded": 1, "conditions": conditions}

    cluster.edit(JOB, "default", name, complete, manager="kube-controller-manager")


def add_pod(cluster: FakeCluster, role: str, *, ready: bool = True) -> Obj:
    """A pod as the workload's present template makes it."""
    kind = "StatefulSet" if role == "engine" else "Deployment"
    workload = cluster.body(kind, f"tiny-{role}")
    template = copy.deepcopy(workload["spec"]["template"])
    ref = {"kind": kind, "name": f"tiny-{role}", "uid": workload["metadata"]["uid"]}
    if kind == "Deployment":
        ref |= {"kind": "ReplicaSet", "name": f"tiny-{role}-5d9c"}
    number = sum(1 for name in cluster.names("Pod") if name.startswith(f"tiny-{role}-"))
    return cluster.add(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                **template["metadata"],
                "name": f"tiny-{role}-{number}",
                "namespace": "default",
                "ownerReferences": [{"apiVersion": "apps/v1", "controller": True, **ref}],
            },
            "spec": template["spec"],
            "status": {
                "phase": "Running",
                "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
            },
        }
    )


def see_template(cluster: FakeCluster) -> None:
    """The StatefulSet's controller has seen the template."""

    def change(body: Obj) -> None:
        body["status"] = {"observedGeneration": body["metadata"]["generation"]}

    cluster.edit(BY_NAME["StatefulSet"], "default", "tiny-engine", change, manager="controller")


async def served(kit: Kit, body: Obj | None = None, *, pods: bool = False) -> Kit:
    """A resource with everything in place."""
    await kit.start()
    kit.cluster.add(body or resource())
    await kit.settle()
    if any("-fetch-" in name for name in kit.cluster.names("Job")):
        finish_fetch(kit.cluster)
        await kit.settle()
    finish_profile(kit.cluster)
    await kit.settle()
    if pods:
        add_pod(kit.cluster, "engine")
        add_pod(kit.cluster, "frontend")
        await kit.settle()
    return kit
