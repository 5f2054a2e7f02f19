"""Clusters and resources as the command line finds them, for its tests."""

from __future__ import annotations

import copy
from typing import Any

from foveal_operator.api import crd
from foveal_operator.kube.types import Obj
from foveal_operator.testing.fake_reader import FakeReader
from tests.support.regenerate import wanted
from tests.support.samples import resource

NOW = 1_767_225_600.0  # 2026-01-01T00:00:00Z
INFERENCES = f"/apis/{crd.GROUP}/{crd.VERSION}/namespaces/models/{crd.PLURAL}"
CRD_PATH = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{crd.PLURAL}.{crd.GROUP}"


def conditions(**found: tuple[str, str, str]) -> list[Obj]:
    """type=(status, reason, message)."""
    return [
        {"type": kind, "status": status, "reason": reason, "message": message,
         "observedGeneration": 3, "lastTransitionTime": "2025-12-31T23:55:00Z"}
        for kind, (status, reason, message) in found.items()
    ]  # fmt: skip


TROUBLE = (
    "qwen-engine-1: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu. Free or add nodes "
    "with the devices and memory asked for, or ask for less. "
    "(docs/reference/reasons.md#unschedulable)"
)
READY_STATUS: Obj = {
    "observedGeneration": 3,
    "conditions": conditions(
        SpecAccepted=("True", "Accepted", "the resource is well formed"),
        BudgetFits=("True", "Fits", "every limit holds"),
        Available=("True", "Available", "2 frontends and 2 engines serve"),
        Ready=("True", "Ready", "every replica of this revision serves"),
    ),
    "url": "http://qwen.models.svc:8000/v1",
    "frontend": {"workload": "Deployment/qwen-frontend", "desired": 2, "ready": 2, "updated": 2},
    "engine": {"workload": "StatefulSet/qwen-engine", "desired": 2, "ready": 2, "updated": 2},
    "budgets": {
        "ipc": {"bytes": 4 << 30, "display": "4.00 GiB", "source": "Derived", "items": 65536,
                "formula": "default", "measuredBytes": 1 << 30},
        "kv": {"bytes": 50 << 30, "display": "50.00 GiB", "source": "Derived",
               "formula": "what is left"},
        "enginePodMemory": {"bytes": 20 << 30, "display": "20.00 GiB", "source": "Pinned",
                            "formula": "base + ipc + headroom",
                            "measuredBytes": (20 << 30) + (1 << 28)},
    },
    "currentRevision": "aaa", "updateRevision": "aaa",
}  # fmt: skip


def serving(**status: Any) -> Obj:
    """A resource that is Ready, with parts of its status replaced."""
    body = copy.deepcopy(resource())
    body["metadata"] |= {"generation": 3, "uid": "u1", "creationTimestamp": "2025-12-29T00:00:00Z"}
    body["status"] = {**copy.deepcopy(READY_STATUS), **status}
    return body


def failing() -> Obj:
    """One that waits for a device and whose other engine was killed."""
    return serving(
        conditions=conditions(
            SpecAccepted=("True", "Accepted", ""),
            EnginesReady=("False", "Unschedulable", TROUBLE),
            Available=("True", "Available", ""),
            Ready=("False", "Unschedulable", f"EnginesReady: {TROUBLE}"),
            Reconciling=("True", "Unschedulable", TROUBLE),
        ),
        engine={"workload": "StatefulSet/qwen-engine", "desired": 2, "ready": 1, "updated": 1},
        updateRevision="bbb",
        rolloutStrategy="FreeFirst: no free device",
        lastFailure={"pod": "qwen-engine-0", "container": "engine", "reason": "OOMKilled",
                     "message": "Killed", "exitCode": 137, "memoryPeak": "19.8GiB",
                     "memoryLimit": "20Gi",
                     "time": "2025-12-31T22:00:00Z"},
    )  # fmt: skip


def definition() -> Obj:
    body = copy.deepcopy(crd.custom_resource_definition())
    body["status"] = {"conditions": [{"type": "Established", "status": "True"}]}
    return body


def node(name: str, memory: str = "64Gi", gpus: int = 0, **labels: str) -> Obj:
    allocatable: Obj = {"memory": memory, "cpu": "16"}
    if gpus:
        allocatable["nvidia.com/gpu"] = str(gpus)
    return {
        "metadata": {"name": name, "labels": labels},
        "spec": {},
        "status": {
            "allocatable": allocatable,
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def healthy() -> FakeReader:
    """A cluster where nothing is missing."""
    gpu = {"nvidia.com/gpu.memory": "81559"}
    apis = {
        "metrics.k8s.io/v1beta1": ["pods", "nodes"],
        "monitoring.coreos.com/v1": ["podmonitors", "prometheusrules"],
        "keda.sh/v1alpha1": ["scaledobjects"],
        "gateway.networking.k8s.io/v1": ["httproutes"],
        "inference.networking.k8s.io/v1": ["inferencepools"],
        "resource.k8s.io/v1": ["resourceclaimtemplates"],
    }
    deployment = {
        "metadata": {"name": "foveal-operator", "namespace": "foveal-system"},
        "spec": {"replicas": 2},
        "status": {"readyReplicas": 2},
    }
    default = {"storageclass.kubernetes.io/is-default-class": "true"}
    answers: dict[str, Any] = {
        "/version": {"major": "1", "minor": "37", "gitVersion": "v1.37.0"},
        CRD_PATH: definition(),
        INFERENCES: {"items": [serving()]},
        f"{INFERENCES}/qwen": serving(),
        "/api/v1/namespaces/models": {
            "metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}
        },
        "/api/v1/nodes": {"items": [node("a"), node("b", "512Gi", 8, **gpu)]},
        "/apis/apps/v1/deployments": {"items": [deployment]},
        "/apis/storage.k8s.io/v1/storageclasses": {
            "items": [{"metadata": {"name": "fast", "annotations": default}}]
        },
        **{
            f"/apis/{version}": {"resources": [{"name": name} for name in names]}
            for version, names in apis.items()
        },
    }
    return FakeReader(answers, namespace="models")


__all__ = ["NOW", "failing", "healthy", "serving", "wanted"]
