"""Nodes, pods that wait for one, and what schedulers say of them."""

from __future__ import annotations

from foveal_operator.kube.types import Obj

GPU = "nvidia.com/gpu"
NO_SELECTOR = (
    "0/3 nodes are available: 2 node(s) didn't match Pod's node affinity/selector, 1 node(s) had "
    "untolerated taint(s). preemption: 0/3 nodes are available: 3 Preemption is not helpful."
)
STARTS = (
    "0/1 nodes are available: 1 node(s) had untolerated taint {node.kubernetes.io/not-ready: }."
)
STARTS_UNNAMED = "0/1 nodes are available: 1 node(s) had untolerated taint(s)."
"""As schedulers say it that do not name the taint."""
FULL = "0/3 nodes are available: 1 Insufficient nvidia.com/gpu, 2 node(s) had untolerated taint(s)."


def node(name: str, gpus: int = 0, memory: str = "64Gi", mib: int = 0, **labels: str) -> Obj:
    if mib:
        labels["nvidia.com/gpu.memory"] = str(mib)
    allocatable = {"memory": memory, **({GPU: str(gpus)} if gpus else {})}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": labels},
        "spec": {},
        "status": {"allocatable": allocatable},
    }


def control_plane() -> Obj:
    body = node("control-plane")
    taint = {"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"}
    body["spec"]["taints"] = [taint]
    return body


def pod(name: str, gpus: int, on: str = "", namespace: str = "default") -> Obj:
    limits = {"resources": {"limits": {GPU: str(gpus)}}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"containers": [limits], **({"nodeName": on} if on else {})},
        "status": {"phase": "Running" if on else "Pending"},
    }


def unschedulable(body: Obj, text: str) -> Obj:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    status = {"phase": "Pending", "conditions": [{**condition, "message": text}]}
    return {**body, "status": status}
